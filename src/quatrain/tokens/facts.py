"""What is in a store: everything that `inspect` tells, as numbers and text that JSON can hold."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quatrain.console import progress
from quatrain.errors import DataError
from quatrain.tokens.excerpts import Excerpt, excerpts
from quatrain.tokens.lengths import Counts, Lengths, PaddedRows, bin_edges, document_lengths
from quatrain.tokens.store import SPLITS, SplitName, TokenStore
from quatrain.tokens.survey import Survey, survey

MOST_FREQUENT = 20
CURVE_POINTS = 80
SEQ_LENS = tuple(2**power for power in range(6, 15))  # 64 .. 16,384: for which padding is also told
QUANTILES = {"shortest": 0.0, "percentile_10": 0.1, "median": 0.5, "percentile_90": 0.9, "longest": 1.0}


@dataclass(frozen=True)
class Bin:
    """Documents of `first` to `last` ids, both included."""

    first: int
    last: int
    documents: int


@dataclass(frozen=True)
class LengthFacts:
    """Lengths of documents in ids of text, their eot not counted."""

    mean: float
    quantiles: dict[str, int]
    histogram: list[Bin]  # the same bins in both splits


@dataclass(frozen=True)
class Padded:
    """Rows of documents, with padding where they end."""

    documents: int
    rows: int
    wasted: int  # positions that hold no target
    share: float  # of all positions


@dataclass(frozen=True)
class PaddingFacts:
    """Padding against packing, at one length of the rows."""

    seq_len: int
    formula: Padded  # over all documents, from the index
    measured: Padded | None  # over documents cut at the eots in the ids; None where none was seen whole
    best_fit: Padded  # all documents packed into rows
    cut: int  # documents longer than a row
    packed_windows: int  # of the same length, in an epoch: no position is wasted
    left_out: int  # targets that an epoch of packed windows leaves out
    share_by_seq_len: dict[int, float]  # what padding wastes at other lengths


@dataclass(frozen=True)
class Frequent:
    """One id that is often a target."""

    id: int
    text: str
    bytes: str | None  # in hex, where they are no whole characters and the tokenizer knows them
    count: int
    share: float


@dataclass(frozen=True)
class TargetFacts:
    """How often each id is a target."""

    targets: int  # n-1
    counted: int  # all of them, or those of a sample
    whole: bool
    used: int  # ids that are a target at least once among those counted
    never: int
    half: int  # the most frequent ids that together are half of the targets
    most_frequent: list[Frequent]
    curve: list[tuple[int, int]]  # (rank, count), ranks spread evenly over their logarithm


@dataclass(frozen=True)
class SplitFacts:
    """One split."""

    documents: int
    tokens: int  # ids, each eot counted
    bytes: int | None  # of text
    bytes_per_token: float | None  # ids of text: no eot is counted
    lengths: LengthFacts
    padding: PaddingFacts
    targets: TargetFacts


@dataclass(frozen=True)
class StoreFacts:
    """Both splits, windows of train, and what store.json says."""

    folder: str
    store: dict[str, Any]  # store.json
    documents: int
    tokens: int
    bytes: int | None
    bytes_per_token: float | None
    splits: dict[SplitName, SplitFacts]
    windows: list[Excerpt]
    verified: dict[str, int] | None  # files and bytes whose hashes were compared

    def json(self) -> dict[str, Any]:
        """store.json with the facts beside its own keys."""
        facts = asdict(self)
        facts.pop("store")
        splits = {name: self.store["splits"][name] | facts["splits"][name] for name in SPLITS}
        return self.store | facts | {"splits": splits}


def store_facts(store: TokenStore, T: int, windows: int, everything: bool = False, verify: bool = False) -> StoreFacts:
    """Look inside: index and sample (or all ids) of both splits, and windows of train as text.

    Raises `DataError` where a file is damaged as far as it was read, or, with `verify`, at all.
    """
    verified = verify_files(store) if verify else None
    lengths = {name: document_lengths(store, name) for name in SPLITS}
    held = [one for one in lengths.values() if one.total]
    edges = bin_edges(min(one.quantile(0) for one in held), max(one.quantile(1) for one in held)) if held else _NONE
    splits = {name: _split(store, name, lengths[name], edges, T, everything) for name in SPLITS}
    text_bytes = [facts.bytes for facts in splits.values()]
    total_bytes = None if None in text_bytes else sum(size or 0 for size in text_bytes)
    return StoreFacts(
        folder=str(store.folder),
        store=store.facts,
        documents=sum(facts.documents for facts in splits.values()),
        tokens=sum(facts.tokens for facts in splits.values()),
        bytes=total_bytes,
        bytes_per_token=_ratio(total_bytes, sum(one.ids for one in lengths.values())),
        splits=splits,
        windows=excerpts(store, "train", T, windows),
        verified=verified,
    )


_NONE = np.array([0, 1], dtype=np.int64)  # edges of a store without documents


def verify_files(store: TokenStore) -> dict[str, int]:
    """Compare the hash of every file; raises `DataError` that names all damaged ones."""
    sizes = store.hashed_sizes()
    with progress("comparing hashes", sum(sizes)) as advance:
        damaged = list(store.damaged(advance))
    if damaged:
        raise DataError("\n".join(damaged))
    return {"files": len(sizes), "bytes": sum(sizes)}


def _split(store: TokenStore, name: SplitName, lengths: Lengths, edges: Counts, T: int, everything: bool) -> SplitFacts:
    seen = survey(store, name, T, everything)
    told = store.facts["splits"][name]
    targets = max(0, told["tokens"] - 1)  # an adopted store may have no validation
    return SplitFacts(
        documents=told["documents"],
        tokens=told["tokens"],
        bytes=told.get("bytes"),
        bytes_per_token=_ratio(told.get("bytes"), lengths.ids),
        lengths=_lengths(lengths, edges),
        padding=_padding(lengths, seen.padded, targets, T),
        targets=_targets(store, seen, targets),
    )


def _lengths(lengths: Lengths, edges: Counts) -> LengthFacts:
    bins = zip(edges.tolist(), edges[1:].tolist(), lengths.histogram(edges).tolist(), strict=False)
    return LengthFacts(
        mean=_ratio(lengths.ids, lengths.total) or 0.0,
        quantiles={word: lengths.quantile(share) for word, share in QUANTILES.items()},
        histogram=[Bin(first, behind - 1, documents) for first, behind, documents in bins],
    )


def _padding(lengths: Lengths, seen: PaddedRows, targets: int, T: int) -> PaddingFacts:
    rows, wasted = lengths.padded(T)
    packed_rows, packed_wasted, cut = lengths.packed(T)
    by_seq_len = {length: _share_wasted(*lengths.padded(length), length) for length in sorted({*SEQ_LENS, T})}
    measured = Padded(seen.documents, seen.rows, seen.wasted, _share_wasted(seen.rows, seen.wasted, T))
    return PaddingFacts(
        seq_len=T,
        formula=Padded(lengths.total, rows, wasted, _share_wasted(rows, wasted, T)),
        measured=measured if seen.documents else None,
        best_fit=Padded(lengths.total, packed_rows, packed_wasted, _share_wasted(packed_rows, packed_wasted, T)),
        cut=cut,
        packed_windows=targets // T,
        left_out=targets % T,
        share_by_seq_len=by_seq_len,
    )


def _share_wasted(rows: int, wasted: int, T: int) -> float:
    return wasted / (rows * T) if rows else 0.0


def _targets(store: TokenStore, seen: Survey, targets: int) -> TargetFacts:
    order = np.argsort(-seen.counts, kind="stable")
    ranked = seen.counts[order]
    used, counted = int(np.count_nonzero(ranked)), int(ranked.sum())
    ranks = np.unique(np.geomspace(1, max(1, used), CURVE_POINTS).round().astype(np.int64))
    return TargetFacts(
        targets=targets,
        counted=counted,
        whole=seen.whole,
        used=used,
        never=store.vocab_size - used,
        half=int(np.searchsorted(np.cumsum(ranked), counted / 2)) + 1 if counted else 0,
        most_frequent=[
            _frequent(store, token, count, counted)
            for token, count in zip(order[: min(used, MOST_FREQUENT)].tolist(), ranked.tolist(), strict=False)
        ],
        curve=[(rank, int(ranked[rank - 1])) for rank in ranks.tolist() if rank <= used],
    )


def _frequent(store: TokenStore, token: int, count: int, counted: int) -> Frequent:
    text = store.tokenizer.decode([token])
    known: list[bytes] | None = getattr(store.tokenizer, "token_bytes", None)  # not of any tokenizer.json
    raw = known[token].hex() if known and "\ufffd" in text else None
    return Frequent(token, text, raw, count, count / counted)


def _ratio(above: int | None, below: int) -> float | None:
    return above / below if above is not None and below else None
