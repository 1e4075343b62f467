"""A token store over shards that lie elsewhere: nothing is copied, and nothing is written beside them.

The store holds the description, the tokenizer, the index of document starts and, where a peer leaves
out the eot at an end of a split, a shard of that one id.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.files import replace_file
from quatrain.interop.config import AdoptConfig
from quatrain.interop.layout import EotStyle, Layout, Scanned, judged, lay_out, style_of, without_eot
from quatrain.interop.scan import Report, scan_all
from quatrain.interop.selection import Folder, Splits, choose_tokenizer, find_folder, select_shards
from quatrain.text.fast import Offsets
from quatrain.text.tokenizers import Tokenizer
from quatrain.tokens.claim import Claim
from quatrain.tokens.overlap import BYTES_PER_TOKEN, SPAN, SpanSample, thinning
from quatrain.tokens.shards import HashedFile
from quatrain.tokens.store import SPLITS, VERSION, SplitName, TokenStore, TokenStream, fingerprint, tokenizer_facts

SHOWN = 32  # ids shown as text: a wrong tokenizer is seen at once
SPAN_CHUNK = 1 << 24  # ids searched for spans at once


def adopt(
    folder: str, out: Path | str, config: AdoptConfig | None = None, report: Report = lambda line: None
) -> dict[str, Any]:
    """Make a token store over the shards in a folder (or `hub:OWNER/NAME`) and return what `adopt --json` prints.

    A store of the same request in `out` is left as it is. Raises `UsageError` for shards that cannot be
    used as they are, with the file's name, and `QuatrainError` when `out` cannot be written.
    """
    config = config or AdoptConfig()
    started = time.monotonic()
    job = _Job.plan(find_folder(folder, config), Path(out), config, report)
    request = job.request()
    claim = Claim(Path(out), job.name, request, command="adopt")
    if claim.finished(lambda: request):
        report(f"{out} already holds the store of this request")
        _check_unchanged(TokenStore(out))
    else:
        with claim:
            job.run(request)
            claim.clear_progress()
        begins = TokenStore(out).train[:SHOWN]
        report(f"train begins: {job.tokenizer.decode(begins.tolist())!r}")
    store = TokenStore(out)
    if config.overlap and "share_in_train" not in store.facts["splits"]["val"]:
        store = _with_overlap(store, report)
    return _summary(store, time.monotonic() - started)


@dataclass
class _Job:
    """One adoption: which shards, in which split, under which tokenizer."""

    shards: Splits
    tokenizer: Tokenizer
    config: AdoptConfig
    out: Path
    name: str
    origin: dict[str, Any]
    report: Report

    @classmethod
    def plan(cls, folder: Folder, out: Path, config: AdoptConfig, report: Report) -> "_Job":
        tokenizer = choose_tokenizer(folder.path, config, report)
        shards = select_shards(folder.path, config, tokenizer, report)
        name = re.sub(r"[^A-Za-z0-9._-]", "", config.name or folder.origin["name"].split("/")[-1]) or "data"
        return cls(shards, tokenizer, config, out, name, folder.origin, report)

    def request(self) -> str:
        """Hash of what decides the store. Of the files it knows path and size, so that asking again reads nothing."""
        options = {"eot": self.config.eot, "val_files": self.config.val_files, "name": self.name}
        content = {
            "version": VERSION,
            "command": "adopt",
            "tokenizer": self.tokenizer.sha256,
            "files": {
                split: [[str(shard.path), shard.offset, shard.tokens, shard.dtype.name] for shard in shards]
                for split, shards in self.shards.items()
            },
            "options": options,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def run(self, request: str) -> None:
        """Read the shards once, write the index files, then `store.json` last."""
        every = [*self.shards["train"], *self.shards["val"]]
        scans = scan_all(every, self.tokenizer, self.report)
        read = [judged(shard, scan, self.tokenizer.eot) for shard, scan in zip(every, scans, strict=True)]
        count = len(self.shards["train"])
        splits_read = {"train": read[:count], "val": read[count:]}
        by_index = without_eot(read)
        layouts = {split: lay_out(splits_read[split], by_index) for split in SPLITS}
        style = style_of(splits_read)
        self._tell(layouts, style)
        replace_file(self.out / "tokenizer.json", self.tokenizer.json)
        splits: dict[str, Any] = {split: self._write(split, layouts[split]) for split in SPLITS}
        facts = self._describe(splits, layouts, style) | {"request": request}
        replace_file(self.out / "store.json", _as_json(facts))

    def _write(self, split: SplitName, laid: Layout) -> dict[str, Any]:
        """Write a split's index, and the shard of one eot where one is missing; what store.json says of the split."""
        stem = f"{self.name}_{split}"
        if not len(laid.starts):
            raise DataError(f"{self.shards[split][0].path}: the {split} split holds no document, only an eot")
        eot = self._eot_shard(stem) if None in laid.parts else None
        known = [part.scan.text_bytes for part in laid.parts if part is not None]
        with HashedFile(self.out / f"{stem}.idx") as index:
            index.write(laid.starts.astype("<u8").tobytes())
            index.finish()
        return {
            "shards": [eot if part is None else _shard_facts(part) for part in laid.parts],
            "tokens": laid.tokens,
            "documents": len(laid.starts),
            "bytes": None if None in known else sum(size for size in known if size is not None),
            "idx": {"file": index.path.name, "sha256": index.sha256.hexdigest()},
            "eot_by_index": laid.eot_by_index,
            "eots_supplied": laid.supplied,
        }

    def _eot_shard(self, stem: str) -> dict[str, Any]:
        dtype = np.dtype("<u2" if self.tokenizer.eot < 1 << 16 else "<u4")
        content = np.array([self.tokenizer.eot], dtype=dtype).tobytes()
        replace_file(self.out / f"{stem}_eot.bin", content)
        digest = hashlib.sha256(content).hexdigest()
        return {"file": f"{stem}_eot.bin", "tokens": 1, "dtype": dtype.name, "offset": 0, "sha256": digest}

    def _describe(self, splits: dict[str, Any], layouts: dict[SplitName, Layout], style: EotStyle) -> dict[str, Any]:
        every = [*self.shards["train"], *self.shards["val"]]
        tokenizer = tokenizer_facts(self.tokenizer)
        origin = self.origin | {
            "format": every[0].format,
            "files": len(every),
            "size": sum(shard.offset + shard.tokens * shard.dtype.itemsize for shard in every),
            "rows": sum(len(laid.starts) for laid in layouts.values()),
        }
        return {
            "version": VERSION,
            "tokenizer": tokenizer,
            "splits": splits,
            "eot_style": style,
            "sources": [origin],
            "split": {"rule": "file names"} | ({"val_files": self.config.val_files} if self.config.val_files else {}),
            "counts": {
                "empty": sum(laid.empty for laid in layouts.values()),
                "cut": sum(len(_cut(laid, style)) for laid in layouts.values()),
            },
            "fingerprint": fingerprint(tokenizer, splits),
        }

    def _tell(self, layouts: dict[SplitName, Layout], style: EotStyle) -> None:
        for split, laid in layouts.items():
            for path in _cut(laid, style):
                side = "begins" if style == "before" else "ends"
                self.report(
                    f"{path.name} ({split}) {side} inside a document: a border of the peer's own has cut it, and its "
                    f"other part lies in another split or file; each part counts as a document"
                )
        if style == "none" and not layouts["train"].eot_by_index:
            self.report(
                f"no eot ({self.tokenizer.eot}) in any file: each split is one document, and where they are one text "
                f"cut in two, validation is the neighbour of train"
            )


def _as_json(facts: dict[str, Any]) -> bytes:
    """In ASCII: the path of a shard may hold bytes that are no UTF-8."""
    return (json.dumps(facts, indent=1) + "\n").encode()


def _cut(laid: Layout, style: EotStyle) -> list[Path]:
    """The files in which a document lacks its head (eot before) or its tail (eot after)."""
    return {"before": laid.cut_begins, "after": laid.cut_ends, "none": []}[style]


def _shard_facts(part: Scanned) -> dict[str, Any]:
    return {
        "file": str(part.shard.path),
        "tokens": part.shard.tokens,
        "dtype": part.shard.dtype.name,
        "offset": part.shard.offset,
        "sha256": part.scan.sha256,
    }


def _check_unchanged(store: TokenStore) -> None:
    """Hash again the shards that were written to since the store was made."""
    made = (store.folder / "store.json").stat().st_mtime_ns
    for split in SPLITS:
        for shard in store.facts["splits"][split]["shards"]:
            path = store.folder / shard["file"]
            if path.stat().st_mtime_ns <= made:
                continue
            with path.open("rb") as file:
                file.seek(shard["offset"])
                if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                    raise DataError(
                        f"{path}: changed since {store.folder} adopted it; restore it, or adopt into another --out"
                    )


def _with_overlap(store: TokenStore, report: Report) -> TokenStore:
    """The same store with the share of sampled validation spans that stand in train written into it."""
    sample = SpanSample(thinning(BYTES_PER_TOKEN * (len(store.train) + len(store.val))))
    for text, borders in _texts(store.val, store.eot, report):
        sample.add(text, borders)
    found = [sample.found_in(text, borders) for text, borders in _texts(store.train, store.eot, report)]
    store.facts["splits"]["val"]["share_in_train"] = round(sample.share(np.concatenate(found)), 6)
    replace_file(store.folder / "store.json", _as_json(store.facts))
    return TokenStore(store.folder)


def _texts(stream: TokenStream, eot: int, report: Report) -> Iterator[tuple[npt.NDArray[np.uint32], Offsets]]:
    """Ids without eots and the borders between documents, a chunk of the stream at a time."""
    for start in range(0, len(stream), SPAN_CHUNK):
        # A span that begins in this chunk may end in the next.
        ids = stream.read(start, min(len(stream), start + SPAN_CHUNK + SPAN - 1)).astype(np.uint32)
        eots = np.flatnonzero(ids == eot)
        text = np.delete(ids, eots)
        yield text, np.concatenate([np.zeros(1, dtype=np.int64), eots - np.arange(len(eots)), [len(text)]])
        if start:
            report(f"looking for validation in train: {start:,} of {len(stream):,} ids")


def _summary(store: TokenStore, seconds: float) -> dict[str, Any]:
    facts = store.facts
    splits = facts["splits"]
    return {
        **store.sizes(),
        "shards": facts["sources"][0]["files"],
        "format": facts["sources"][0]["format"],
        "eot_style": facts["eot_style"],
        "eots_supplied": sum(splits[split]["eots_supplied"] for split in SPLITS),
        **facts["counts"],
        "share_in_train": splits["val"].get("share_in_train"),
        "seconds": round(seconds, 3),
        "fingerprint": store.fingerprint,
    }
