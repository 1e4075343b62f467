"""Documents to a token store: read, tokenize in threads, write shards in order.

A document begins with eot and a split ends with one more. Documents are tokenized in parallel and
written in the order of the sources, with a bounded number of them in memory.
"""

import contextlib
import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quatrain.errors import DataError
from quatrain.files import replace_file
from quatrain.text.sources import Document, Source, content_hash, find_sources, read_documents
from quatrain.text.split import Rule, by_fraction, by_hashes, text_hash
from quatrain.text.tokenizers import Tokenizer, named_tokenizer, whole_characters
from quatrain.tokens.claim import PROGRESS, Claim
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.overlap import share_in_train, thinning
from quatrain.tokens.pieces import Admitted, Encoder
from quatrain.tokens.shards import SplitWriter
from quatrain.tokens.store import SPLITS, VERSION, SplitName, TokenStore, fingerprint

BATCH_BYTES = 1 << 20  # text handed to a thread at once
BATCHES_AHEAD = 4  # batches waiting for each thread: bounds the memory
SECONDS_BETWEEN_LINES = 5.0

Report = Callable[[str], None]
Assigned = tuple[Document, SplitName | None]  # None: the rule decides by the text

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Counts:
    """What happened to the documents of one pass."""

    empty: int = 0
    duplicates: int = 0  # left out of train because their text stands in the validation files
    surrogates: int = 0
    rows: dict[Path, int] = field(default_factory=dict)


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: Path | str,
    config: PrepareConfig | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Write a token store from documents and return what is in it (the keys of `prepare --json`).

    The same sources and options give the same bytes, whatever `workers` is. A folder that already
    holds the finished store of this request is left as it is; an unfinished one is written again.
    Raises `UsageError` for wrong input and `QuatrainError` when `out` cannot be written.
    """
    config = config or PrepareConfig()
    started = time.monotonic()
    words = [sources] if isinstance(sources, str | Path) else sources
    job = _Job.plan([str(word) for word in words], Path(out), config, report)
    claim = Claim(Path(out), job.name, job.request())
    if claim.finished():
        report(f"{out} already holds the store of this request")
    else:
        with claim:
            job.run(claim)
    return _summary(TokenStore(out), time.monotonic() - started)


@dataclass
class _Job:
    """One preparation: what is read, how it is cut, where it goes."""

    sources: list[Source]
    val_sources: list[Source]
    tokenizer: Tokenizer
    config: PrepareConfig
    out: Path
    name: str
    hashes: dict[Path, str]
    report: Report
    counts: Counts = field(default_factory=Counts)
    claim: Claim = field(init=False)
    last_said: float = field(default_factory=time.monotonic)

    @classmethod
    def plan(cls, words: list[str], out: Path, config: PrepareConfig, report: Report) -> "_Job":
        sources, passed_over = find_sources(words)
        val_sources, val_passed_over = find_sources(list(config.val)) if config.val else ([], [])
        for path in passed_over + val_passed_over:
            report(f"passed over {path}: not a kind of file that holds documents")
        hashes = {source.path: content_hash(source) for source in [*sources, *val_sources]}

        def characters() -> Iterator[str]:
            seen: set[str] = set()
            for source in [*sources, *val_sources]:
                for document in read_documents(source, config.text_column):
                    seen.update(whole_characters(document.text)[0])
            return iter(seen)

        usual = "char" if all(source.kind == "poems" for source in sources) else "gpt2"
        tokenizer = named_tokenizer(config.tokenizer or usual, characters, config.eot)
        name = re.sub(r"[^A-Za-z0-9._-]", "", config.name or sources[0].stem) or "data"
        return cls(sources, val_sources, tokenizer, config, out, name, hashes, report)

    def request(self) -> str:
        """Hash of everything that decides the ids and the split."""
        options = {
            key: value for key, value in asdict(self.config).items() if key not in ("workers", "tokenizer", "val")
        }
        content = {
            "version": VERSION,
            "tokenizer": self.tokenizer.sha256,
            "sources": [self._identity(source) for source in self.sources],
            "val_sources": [self._identity(source) for source in self.val_sources],
            "options": options | {"name": self.name},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _identity(self, source: Source) -> list[str]:
        return [source.kind, source.compression, self.hashes[source.path]]

    def run(self, claim: Claim) -> None:
        """Write the shards, then `store.json` last."""
        self.claim = claim
        replace_file(self.out / "tokenizer.json", self.tokenizer.json)
        splits, rule = self._write_by_rule()
        tokenizer = {
            "name": self.tokenizer.name,
            "sha256": self.tokenizer.sha256,
            "vocab_size": self.tokenizer.vocab_size,
            "eot": self.tokenizer.eot,
            "eot_text": self.tokenizer.eot_text,
        }
        facts = {
            "version": VERSION,
            "tokenizer": tokenizer,
            "splits": splits,
            "eot_style": "before",
            "sources": [self._describe(source) for source in self._all_sources()],
            "split": rule,
            "counts": {
                "empty": self.counts.empty,
                "duplicates": self.counts.duplicates,
                "surrogates": self.counts.surrogates,
            },
            "request": claim.request,
            "fingerprint": fingerprint(tokenizer, splits),
        }
        replace_file(self.out / "store.json", (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())
        (self.out / PROGRESS).unlink()

    def _describe(self, source: Source) -> dict[str, Any]:
        size = source.path.stat().st_size
        rows = self.counts.rows[source.path]
        return {"name": source.name, "size": size, "sha256": self.hashes[source.path], "rows": rows}

    def _write_by_rule(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write both splits by the rule that the options name; `(splits, the rule as store.json tells it)`."""
        config = self.config
        if config.val_tail:
            return self._write(self._cut_tail(), by_hashes(())), {"rule": "tail", "share": config.val_tail}
        if config.val:
            return self._write(self._validation_first(), by_hashes(())), {"rule": "files"}
        if config.val_docs:
            hashes = self._hashes_at(set(config.val_docs))
            return self._write(self._documents(), by_hashes(hashes)), {
                "rule": "documents",
                "indices": list(config.val_docs),
            }
        return self._write_by_fraction(), {"rule": "hash", "fraction": config.val_fraction, "seed": config.seed}

    def _write_by_fraction(self) -> dict[str, Any]:
        smallest = _Smallest(by_fraction(self.config.val_fraction))
        splits = self._write(self._documents(), smallest, may_lack_val=True)
        if not splits["val"]["documents"]:
            # Only a small corpus holds out nothing by chance: a second pass over it costs little.
            self.report("no document fell into validation by its hash: holding out the one of smallest hash")
            splits = self._write(self._documents(), by_hashes({smallest.hashed}))
        return splits

    def _documents(self) -> Iterator[Assigned]:
        yield from self._read(self.sources, None)

    def _read(self, sources: list[Source], split: SplitName | None) -> Iterator[Assigned]:
        for source in sources:
            rows = 0
            for document in read_documents(source, self.config.text_column):
                rows += 1
                yield document, split
            self.counts.rows[source.path] = rows

    def _validation_first(self) -> Iterator[Assigned]:
        """Validation files before the others, so that a text which stands in both can be left out of train."""
        yield from chain(self._read(self.val_sources, "val"), self._read(self.sources, "train"))

    def _cut_tail(self) -> Iterator[Assigned]:
        read = [document for document, _ in self._documents()]
        documents = [document for document in read if document.text]
        if len(documents) != 1:
            raise DataError(
                f"--val-tail cuts one document, and there are {len(documents)}; hold out whole documents with "
                f"--val-fraction, --val-docs or --val"
            )
        text, place = documents[0]
        cut = int((1 - Decimal(str(self.config.val_tail))) * len(text))  # exact: in floats 1 - 0.9 is below 0.1
        self.report(
            f"warning: --val-tail splits a document at character {cut:,} of {len(text):,}: the two sides are "
            f"neighbours, so validation is a little easier than on an unseen document"
        )
        yield from ((document, None) for document in read if not document.text)  # to be counted
        yield Document(text[:cut], place), "train"
        yield Document(text[cut:], place), "val"

    def _hashes_at(self, indices: set[int]) -> set[int]:
        found: dict[int, int] = {}
        count = 0
        for count, (document, _) in enumerate(self._documents(), 1):
            if count - 1 in indices:
                found[count - 1] = text_hash(self.config.seed, whole_characters(document.text)[1])
        missing = sorted(indices - set(found))
        if missing:
            raise DataError(f"--val-docs names document {missing[0]}, and there are {count} (0 to {count - 1})")
        return set(found.values())

    def _write(self, documents: Iterable[Assigned], rule: Rule, may_lack_val: bool = False) -> dict[str, Any]:
        """One pass: tokenize all documents and write both splits; returns what store.json says of them."""
        self.claim.remove_shards()  # of an interrupted try, or of a first pass that held nothing out
        self.counts = Counts()
        encoder = Encoder(self.tokenizer, thinning(sum(source.path.stat().st_size for source in self._all_sources())))
        with contextlib.ExitStack() as files:
            writers = {split: files.enter_context(self._writer(split, encoder.dtype)) for split in SPLITS}
            batches = enumerate(_batches(self._admit(documents, rule)))
            for piece in chain.from_iterable(_in_order(encoder, batches, self.config.workers)):
                writers[piece.split].add(piece)
                self._say_how_far(writers)
            overlap = share_in_train(writers["train"].spans, writers["val"].spans)
            splits: dict[str, Any] = {split: writer.close() for split, writer in writers.items()}
        self._check_documents(splits, may_lack_val)
        return splits | {"val": splits["val"] | {"share_in_train": round(overlap, 6)}}

    def _admit(self, documents: Iterable[Assigned], rule: Rule) -> Iterator[Admitted]:
        """The documents that go into the store, in order, each with its split; the others are counted."""
        held_out: set[int] = set()
        for document, split in documents:
            text, utf8, surrogates = whole_characters(document.text)
            if not text:
                self.counts.empty += 1
                continue
            hashed = text_hash(self.config.seed, utf8)
            if split == "val":
                held_out.add(hashed)
            elif split == "train" and hashed in held_out:
                self.counts.duplicates += 1
                continue
            self.counts.surrogates += surrogates
            yield Admitted(utf8, split or ("val" if rule(hashed) else "train"), document.place)

    def _writer(self, split: SplitName, dtype: np.dtype[Any]) -> SplitWriter:
        return SplitWriter(self.out, f"{self.name}_{split}", dtype, self.tokenizer.eot, self.config.shard_size)

    def _all_sources(self) -> list[Source]:
        return [*self.sources, *self.val_sources]

    def _say_how_far(self, writers: dict[SplitName, SplitWriter]) -> None:
        if time.monotonic() - self.last_said > SECONDS_BETWEEN_LINES:
            self.last_said = time.monotonic()
            documents, tokens = (sum(getattr(w, what) for w in writers.values()) for what in ("documents", "tokens"))
            self.report(f"{documents:,} documents, {tokens:,} ids")

    def _check_documents(self, splits: dict[str, Any], may_lack_val: bool) -> None:
        train, val = (splits[split]["documents"] for split in SPLITS)
        if not train + val:
            files = f"{len(self.sources)} files" if len(self.sources) > 1 else f"{self.sources[0].path}"
            raise DataError(f"no document with text in {files} ({self.counts.empty} empty); expected at least one")
        if train + val == 1:
            raise DataError(
                f"{self.sources[0].path} holds one document (a .txt file is one), which cannot be split by documents: "
                f"cut its end off with --val-tail 0.1, or give validation files with --val"
            )
        lacking = "train" if not train else "val" if not val and not may_lack_val else ""
        if lacking:
            raise DataError(
                f"the {lacking} split has no document ({train} train, {val} val, the same text always in the same "
                f"split); hold out others with --val-docs or --val, or cut a one-document corpus with --val-tail 0.1"
            )


class _Smallest:
    """A rule that also remembers the smallest hash it was asked about."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.hashed = 2**64

    def __call__(self, hashed: int) -> bool:
        self.hashed = min(self.hashed, hashed)
        return self.rule(hashed)


def _batches(documents: Iterable[Admitted]) -> Iterator[list[Admitted]]:
    batch: list[Admitted] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.utf8)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map` in threads, in order, with a bounded number of items read ahead (the tokenizers release the GIL)."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers * BATCHES_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _summary(store: TokenStore, seconds: float) -> dict[str, Any]:
    splits, counts = store.facts["splits"], store.facts["counts"]
    train, val = (splits[split]["tokens"] for split in SPLITS)
    return {
        "documents": sum(splits[split]["documents"] for split in SPLITS),
        "tokens": train + val,
        "train_tokens": train,
        "val_tokens": val,
        **counts,
        "near_duplicates": 0,  # none is looked for yet, and no document is ever skipped
        "skipped": 0,
        "seconds": round(seconds, 3),
        "fingerprint": store.fingerprint,
    }
