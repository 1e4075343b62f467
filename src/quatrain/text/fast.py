"""Byte-level BPE by gigatoken, an order of magnitude faster than tiktoken, used only where it proves itself equal.

It is loaded without special tokens: by default it would turn a literal `<|endoftext|>` into the id.
"""

import json
import tempfile
import threading
from binascii import b2a_base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quatrain.errors import QuatrainError
from quatrain.files import writing

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

# At most so many, which keep a dozen threads busy, for encoding is a third of their work. What an instance remembers of
# the words it has met grows without end (60 MB after 300 MB of text, 170 MB after 1 GB): it is replaced in time.
INSTANCES = 3
REMEMBERED = 1536 << 20  # bytes of text that all instances together may have met

# What has set tokenizers apart: markers, contractions, scripts, combining marks, all kinds of white space,
# runs of one letter, controls, characters beyond the basic plane, and what only looks like a word.
HARD_STRINGS = (
    "",
    " ",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|>",
    "I'm you're we've he'll they'd it's 'S 'LL 'tis",
    "\n\n\n  \t \r\n x  \n",
    "  leading and trailing  ",
    "\u00a0\u2003\u3000\u2028\u2029\u200b\ufeff\x85\x1c\x1d\x1e\x1f",
    "0123456789 \u00b2\u00bd \u0661\u0662 \u2167 1e-3 3.14",
    "e\u0301 \u00e9 \u1e9b\u0323 o\u0308\u0304 \u0e33\u0e49",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u4f60\u597d \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U00010348 \U000e0001",
    "\x00\x01\x7f\x80\ufffd\ufffe\uffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "-" * 200 + "=" * 99 + " " * 130 + "\n" * 70,
    "naïve café Straße ǅ ﬁ İstanbul ſ K",
    "{'a': [1, 2], \"b\": None}  # TODO(x): y->z; https://a.b/c?d=e&f#g",
)


class FastBPE:
    """Ids of many documents at once, from any number of threads."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._idle: list[tuple[Any, int]] = []  # with the bytes that each has met
        self._alive = 0
        self._room = threading.Semaphore(INSTANCES)
        self._counting = threading.Lock()

    @classmethod
    def of_ranks(cls, words: Sequence[bytes], pattern: str, reference: Callable[[str], Ids]) -> "FastBPE | None":
        """The engine for the words in the order of their ranks, or None where gigatoken has no wheel.

        `pattern` is gigatoken's name for the pattern that cuts text before merging. Raises `QuatrainError` if it does
        not give the reference's ids on every one of `HARD_STRINGS`.
        """
        gigatoken = _library()
        if gigatoken is None:
            return None
        content = b"".join([b"%b %d\n" % (b2a_base64(word, newline=False), rank) for rank, word in enumerate(words)])

        def make() -> Any:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "ranks.tiktoken"
                with writing(path, len(content)):
                    path.write_bytes(content)
                return gigatoken.Tokenizer.from_tiktoken(path, pattern, {}).backend

        engine = cls(make)
        differs = engine.differs(HARD_STRINGS, reference)
        if differs is not None:
            raise QuatrainError(f"gigatoken and tiktoken differ on {differs!r}; pip uninstall gigatoken, and report it")
        return engine

    @classmethod
    def of_json(cls, tokenizer_json: bytes, reference: Callable[[str], Ids]) -> "FastBPE | None":
        """The engine for a tokenizer.json of byte-level BPE, or None.

        None is for other kinds of tokenizers and for those that gigatoken does not read or does not read alike: it must
        give the reference's ids on every one of `HARD_STRINGS`, with the file's special tokens in them too.
        """
        gigatoken, bare = _library(), _without_special_tokens(tokenizer_json)
        if gigatoken is None or bare is None:
            return None
        content, special = bare
        engine = cls(lambda: gigatoken.Tokenizer.from_json(content).backend)
        texts = [*HARD_STRINGS, *special, *(f"a{token}b {token}\n" for token in special)]
        try:
            return None if engine.differs(texts, reference) is not None else engine
        except Exception:  # of its own kinds; the reference does the work
            return None

    def differs(self, texts: Sequence[str], reference: Callable[[str], Ids]) -> str | None:
        """The first text on which this is not the reference, or None."""
        ids, offsets = self.encode([text.encode() for text in texts])
        for number, text in enumerate(texts):
            if not np.array_equal(ids[offsets[number] : offsets[number + 1]], reference(text)):
                return text
        return None

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Offsets]:
        """Ids of documents in UTF-8, end to end, and the len(texts) + 1 offsets between them; releases the GIL."""
        if not texts:
            return np.empty(0, dtype=np.uint32), np.zeros(1, dtype=np.int64)
        # One instance serves one thread at a time: a lock inside would make the others wait.
        with self._room:
            backend, met = self._taken()
            layout = backend.encode_batch(list(texts), parallel=False).layout
            met += sum(map(len, texts))
            with self._counting:
                if met < REMEMBERED // self._alive:
                    self._idle.append((backend, met))
                else:
                    self._alive -= 1
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = cast(Ids, np.asarray(layout.content.data))
        return ids[offsets[0] : offsets[-1]], offsets - offsets[0]

    def forget(self) -> None:
        """Free what has been learned of words; for when no thread encodes."""
        with self._counting:
            self._alive -= len(self._idle)
            self._idle.clear()

    def _taken(self) -> tuple[Any, int]:
        with self._counting:
            if self._idle:
                return self._idle.pop()
            self._alive += 1
        return self._load(), 0


def _library() -> Any:
    try:
        import gigatoken
    except ImportError:
        return None
    return gigatoken


def _without_special_tokens(tokenizer_json: bytes) -> tuple[str, list[str]] | None:
    """A byte-level BPE's file without its special tokens, and these; None for any other file."""
    content = json.loads(tokenizer_json)
    model, added = content.get("model") or {}, content.get("added_tokens") or []
    before = content.get("pre_tokenizer") or {}
    kinds = {step.get("type") for step in before.get("pretokenizers", [before])}
    if model.get("type", "BPE") != "BPE" or "ByteLevel" not in kinds or not all(token["special"] for token in added):
        return None
    special = [token["content"] for token in added]
    model["vocab"] = {word: token for word, token in model["vocab"].items() if word not in set(special)}
    content["added_tokens"], content["post_processor"] = [], None
    return json.dumps(content), special
