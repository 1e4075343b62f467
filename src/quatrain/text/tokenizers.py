"""Text to ids and back: `char`, `bytes`, `gpt2`, or any `tokenizer.json`.

Every tokenizer has an eot, the id of `<|endoftext|>`, that **no text can produce**: a document that
spells the marker gets the ids of its thirteen ordinary characters. Each one knows the
`tokenizer.json` that gives Hugging Face the same ids; the hash of those bytes is its identity.
"""

import codecs
import functools
import hashlib
import json
import threading
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError, UsageError, did_you_mean
from quatrain.text.fast import FastBPE, Ids, Offsets
from quatrain.text.tokenizer_json import EOT_TEXT, bpe_json, byte_letters, byte_level_json

NAMES = ("char", "bytes", "gpt2")
SEPARATOR = "\U0010ffff"  # no byte stands for it
GPT2_JSON_SHA256 = "6282c5acb7fb9017fae032e2a932f49ef57fa4aa067bae9ef5c3c7bb4963d9b3"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# The pattern that cuts text into pieces before merging: Radford et al. 2019, released code (encoder.py).
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Tokenizer(ABC):
    """Text to ids and back. `vocab_size` counts eot; `json` is the content of its tokenizer.json."""

    name: str
    vocab_size: int
    eot: int
    json: bytes
    eot_text = EOT_TEXT

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json: two tokenizers are the same if and only if it is."""
        return hashlib.sha256(self.json).hexdigest()

    def encode(self, text: str) -> Ids:
        """The ids of a text, uint32, shape (n,); never holds eot.

        Raises `DataError` for a lone surrogate, which is no text, and for what the vocabulary cannot spell.
        """
        try:
            return self._encode(text)
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            raise DataError(f"lone surrogate {code} at position {error.start}; expected text that is UTF-8") from error

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[Ids, Offsets]:
        """Ids of documents in UTF-8, end to end, and the len(texts) + 1 offsets between them.

        The ids of `encode`, by a faster way where there is one. Raises `DataError` as that does.
        """
        parts = [self.encode(text.decode()) for text in texts]
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return np.concatenate([np.empty(0, dtype=np.uint32), *parts]), offsets

    def forget(self) -> None:
        """Free what makes `encode_batch` faster the more it has seen; it is learned again by the next call."""
        engine = vars(self).get("_engine")
        if engine:
            engine.forget()

    @abstractmethod
    def _encode(self, text: str) -> Ids: ...

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; eot shows as `<|endoftext|>`, broken UTF-8 as U+FFFD; `DataError` for what is no id."""

    @abstractmethod
    def stream(self) -> "TextStream":
        """A decoder for ids that come one at a time."""

    def token_lengths(self) -> npt.NDArray[np.int64] | None:
        """Bytes of text that each id stands for (eot: 0), shape (vocab_size,); None where that is not fixed."""
        return None


class TextStream(Protocol):
    """Feeds on single ids and returns the text that is complete so far, never half a character."""

    def push(self, token: int) -> str:
        """The text that this id completes."""
        ...

    def end(self) -> str:
        """What is left when no id follows."""
        ...


class _TableTokenizer(Tokenizer):
    """A tokenizer whose ids each stand for fixed bytes."""

    token_bytes: list[bytes]

    def decode(self, ids: Iterable[int]) -> str:
        array = np.fromiter(ids, dtype=np.int64)
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if len(outside):
            raise DataError(f"id {outside[0]} is not in the vocabulary of {self.vocab_size} ids")
        return b"".join(self.token_bytes[token] for token in array).decode("utf-8", errors="replace")

    def stream(self) -> "TextStream":
        return _ByteStream(self.token_bytes)

    def token_lengths(self) -> npt.NDArray[np.int64]:
        lengths = np.array([len(token) for token in self.token_bytes], dtype=np.int64)
        lengths[self.eot] = 0
        return lengths


class _ByteStream:
    def __init__(self, token_bytes: list[bytes]) -> None:
        self.token_bytes = token_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.token_bytes[token])

    def end(self) -> str:
        return self.decoder.decode(b"", final=True)


class CharTokenizer(_TableTokenizer):
    """Every distinct character is a token: ids of the sorted characters 0..V-2, eot = V-1."""

    name = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self.eot = len(self.characters)
        self.vocab_size = self.eot + 1
        self.token_bytes = [character.encode() for character in self.characters] + [EOT_TEXT.encode()]
        vocab = {character: token for token, character in enumerate(self.characters)} | {EOT_TEXT: self.eot}
        self.json = bpe_json(vocab, merges=[], eot=self.eot, pre_tokenizer=None, decoder={"type": "Fuse"})
        self._id_of = np.full(0x110000, self.eot, dtype=np.uint32)  # by code point; eot marks "never seen"
        self._id_of[[ord(character) for character in self.characters]] = np.arange(self.eot, dtype=np.uint32)

    def _encode(self, text: str) -> Ids:
        ids: Ids = self._id_of[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]
        unknown = np.flatnonzero(ids == self.eot)
        if len(unknown):
            raise DataError(self._never_seen(text, int(unknown[0])))
        return ids

    def _never_seen(self, text: str, position: int) -> str:
        character = text[position]
        label = f"{character!r} (U+{ord(character):04X} {unicodedata.name(character, 'without a name')})"
        return (
            f"character {label} at position {position} is not among the {self.eot} characters that this "
            f"char tokenizer was built from; leave it out, or prepare the data again with text that holds it"
        )


class ByteTokenizer(_TableTokenizer):
    """id = byte of the UTF-8 text, eot = 256."""

    name = "bytes"
    vocab_size = 257
    eot = 256

    def __init__(self) -> None:
        self.token_bytes = [bytes([byte]) for byte in range(256)] + [EOT_TEXT.encode()]
        vocab = {letter: byte for byte, letter in byte_letters().items()} | {EOT_TEXT: self.eot}
        self.json = byte_level_json(vocab, merges=[], eot=self.eot, use_regex=False)

    def _encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)


class GPT2Tokenizer(_TableTokenizer):
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2), from the merges that ship with the package."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._merges = _gpt2_merges()
        # The first 256 ids are the byte letters, in the order in which byte_letters has them; no letter is a space.
        self._words = [*byte_letters().values(), *"\n".join(self._merges).replace(" ", "").split("\n")]
        byte_of = {ord(letter): chr(byte) for byte, letter in byte_letters().items()}
        byte_of[ord("\n")] = SEPARATOR
        spelled = "\n".join(self._words).translate(byte_of).split(SEPARATOR)
        self.token_bytes = [*(word.encode("latin-1") for word in spelled), EOT_TEXT.encode()]

    @functools.cached_property
    def json(self) -> bytes:  # type: ignore[override]  # made when it is asked for: most uses do without
        vocab = {word: token for token, word in enumerate(self._words)} | {EOT_TEXT: self.eot}
        return byte_level_json(vocab, self._merges, eot=self.eot, use_regex=True)

    @property
    def sha256(self) -> str:
        return GPT2_JSON_SHA256

    @functools.cached_property
    def _encoding(self) -> Any:
        import tiktoken

        return tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks={word: rank for rank, word in enumerate(self.token_bytes[:-1])},
            special_tokens={EOT_TEXT: self.eot},
            explicit_n_vocab=self.vocab_size,
        )

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[Ids, Offsets]:
        fast = self._fast
        return fast.encode(texts) if fast else super().encode_batch(texts)

    @property
    def _fast(self) -> FastBPE | None:
        with self._loading:  # the threads that come first all ask for it
            return self._engine

    @functools.cached_property
    def _engine(self) -> FastBPE | None:
        return FastBPE.of_ranks(self.token_bytes[:-1], "gpt2", self.encode)

    def _encode(self, text: str) -> Ids:
        text.encode()  # tiktoken would replace a lone surrogate without a word
        try:
            # No special token is allowed and none forbidden: the marker in a text is ordinary characters.
            ids: Ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
            return ids
        except ValueError as error:  # its regular expressions give up at about a million spaces in a row
            raise DataError(f"tiktoken cannot cut this text into words ({error}); is it text?") from error


class FileTokenizer(Tokenizer):
    """Any `tokenizer.json`, read by Hugging Face's `tokenizers`; ids are never renumbered."""

    def __init__(self, content: bytes, place: str, eot_text: str = EOT_TEXT) -> None:
        library = _tokenizers_library(place)
        try:
            self._tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises a bare Exception
            raise DataError(f"{place}: not a tokenizer.json that can be read ({error})") from error
        self._tokenizer.encode_special_tokens = True  # special tokens inside a text are spelled out
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eot = self._tokenizer.token_to_id(eot_text)
        if eot is None:
            raise DataError(f"{place}: has no token {eot_text!r}; name the one that separates documents with --eot")
        self.name = "tokenizer.json"
        self._place = place
        self.eot = eot
        self.eot_text = eot_text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.json = content
        self._loading = threading.Lock()
        self.encode(eot_text)

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[Ids, Offsets]:
        with self._loading:
            engine = self._engine
        return engine.encode(texts) if engine else super().encode_batch(texts)

    @functools.cached_property
    def _engine(self) -> FastBPE | None:
        return FastBPE.of_json(self.json, self.encode)

    def _encode(self, text: str) -> Ids:
        text.encode()
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        if self.eot in ids:  # an added token that is not special, or an unknown character where eot stands for those
            raise DataError(
                f"{self._place}: text gives the id {self.eot} of {self.eot_text!r} itself, so a document could forge a "
                f"separator; expected a special token that stands for nothing else (another one with --eot)"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def stream(self) -> "TextStream":
        return _PrefixStream(self.decode)


class _PrefixStream:
    """Decodes the whole prefix again for each id: the meaning of an id may depend on those before it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.emitted = 0

    def push(self, token: int) -> str:
        self.ids.append(token)
        # A trailing U+FFFD may be a character of which more bytes follow.
        return self._new(self.decode(self.ids).rstrip("\ufffd"))

    def end(self) -> str:
        return self._new(self.decode(self.ids))

    def _new(self, text: str) -> str:
        piece = text[self.emitted :]
        self.emitted = max(self.emitted, len(text))
        return piece


def whole_characters(text: str) -> tuple[str, bytes, int]:
    """The text, its UTF-8 and how many lone surrogates (legal in JSON, not in text) became U+FFFD."""
    try:
        return text, text.encode(), 0
    except UnicodeEncodeError:
        # As tiktoken does it: pairs that belong together are joined, what stays alone is replaced.
        fixed = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return fixed, fixed.encode(), fixed.count("\ufffd") - text.count("\ufffd")


def build_tokenizer(
    docs: Iterable[str],
) -> tuple[Callable[[str], list[int]], Callable[[Iterable[int]], str], int, int]:
    """A character tokenizer from documents: `(encode, decode, V, eot)`.

    Ids of the sorted characters are 0..V-2, eot = V-1, and V counts eot. `encode` returns a list and
    never emits eot; `decode` shows eot as `<|endoftext|>`.

    >>> encode, decode, V, eot = build_tokenizer(["banana", "bandana"])
    >>> V, eot, encode("nab"), decode([4, 1, 0])
    (5, 4, [3, 0, 1], '<|endoftext|>ba')
    """
    tokenizer = CharTokenizer(character for document in docs for character in document)
    return lambda text: tokenizer.encode(text).tolist(), tokenizer.decode, tokenizer.vocab_size, tokenizer.eot


def named_tokenizer(name: str, characters: Callable[[], Iterable[str]], eot_text: str = EOT_TEXT) -> Tokenizer:
    """The tokenizer of that name, or of that path to a tokenizer.json.

    `characters` is called only for `char`: it gives every character of every document.
    """
    if name == "char":
        return CharTokenizer(characters())
    if name in ("bytes", "gpt2"):
        return ByteTokenizer() if name == "bytes" else gpt2()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UsageError(
            f"no tokenizer '{name}'{did_you_mean(name, NAMES)}; there is {', '.join(NAMES)}, "
            f"or the path to a tokenizer.json"
        )
    return load_tokenizer(path, eot_text)


def load_tokenizer(path: Path, eot_text: str = EOT_TEXT) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes; our own three are recognised by their content."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a tokenizer.json") from error
    characters = _char_from_json(content)
    if characters is not None:
        return characters
    for known in (ByteTokenizer, gpt2):
        tokenizer: Tokenizer = known()
        if tokenizer.json == content:
            return tokenizer
    return FileTokenizer(content, str(path), eot_text)


@functools.cache
def gpt2() -> GPT2Tokenizer:
    """The GPT-2 tokenizer, built once: 50,000 merges take a moment."""
    return GPT2Tokenizer()


def _char_from_json(content: bytes) -> CharTokenizer | None:
    try:
        characters = [word for word in json.loads(content)["model"]["vocab"] if word != EOT_TEXT]
        tokenizer = CharTokenizer(characters)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return tokenizer if tokenizer.json == content else None


def _tokenizers_library(place: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            f"{place}: this tokenizer needs the library 'tokenizers': pip install 'quatrain[hf]'"
        ) from error
    return tokenizers


def _gpt2_merges() -> list[str]:
    content = (resources.files("quatrain.text") / "vocab.bpe").read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != VOCAB_BPE_SHA256:
        raise DataError(
            f"vocab.bpe of the package has sha256 {found}, expected {VOCAB_BPE_SHA256}; install quatrain again"
        )
    return content.decode().rstrip("\n").split("\n")[1:]  # the first line is the version
