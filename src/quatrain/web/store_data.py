"""A token store as data for the page: facts, counted once for each store, and windows, one at a time."""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from quatrain.text.visible import visible
from quatrain.tokens import sentences
from quatrain.tokens.excerpts import Excerpt, excerpts, nth_excerpt
from quatrain.tokens.facts import SplitFacts, store_facts
from quatrain.tokens.store import SPLITS, SplitName, TokenStore
from quatrain.web.markup import KEPT


def facts(store: TokenStore, seq_len: int) -> dict[str, Any]:
    """What `inspect` tells of a store, as far as the page shows it; no path is in it."""
    return _facts(store.folder, store.fingerprint, seq_len)


@lru_cache(maxsize=8)
def _facts(folder: Path, fingerprint: str, seq_len: int) -> dict[str, Any]:
    """Of one content: a store that was written anew has another fingerprint."""
    told = store_facts(TokenStore(folder), seq_len, windows=0)
    return {
        "name": folder.name,
        "fingerprint": fingerprint,
        "tokenizer": {key: told.store["tokenizer"][key] for key in ("name", "vocab_size")},
        "documents": told.documents,
        "tokens": told.tokens,
        "bytes_per_token": told.bytes_per_token,
        "seq_len": seq_len,
        "splits": {name: _split(told.splits[name]) for name in SPLITS},
        "left_out": sentences.left_out(told.store),
        "remarks": [
            sentences.split_rule(told.store),
            *sentences.looked_for(told.store),
            *sentences.remarks(told.store),
        ],
        "frequent": [
            {"id": one.id, "text": visible(sentences.spelled(one.text, one.bytes)), "share": one.share}
            for one in told.splits["train"].targets.most_frequent
        ],
    }


def _split(split: SplitFacts) -> dict[str, Any]:
    bins = [
        {"label": sentences.bin_label(one.first, one.last), "documents": one.documents}
        for one in split.lengths.histogram
    ]
    return {
        "documents": split.documents,
        "tokens": split.tokens,
        "bytes": split.bytes,
        "bytes_per_token": split.bytes_per_token,
        "mean": split.lengths.mean,
        "quantiles": split.lengths.quantiles,
        "histogram": bins,
        "padding": split.padding.formula.share,
        "best_fit": split.padding.best_fit.share,
    }


def window(store: TokenStore, split: SplitName, seq_len: int, number: int) -> dict[str, Any] | None:
    """Window 0 of a split holds a border between documents, if any does; the others are drawn. None: no text."""
    shown = excerpts(store, split, seq_len, 1) if number == 0 else nth_excerpt(store, split, seq_len, number)
    return _shown(shown[0], store.facts["splits"][split]["documents"]) if shown else None


def _shown(excerpt: Excerpt, documents: int) -> dict[str, Any]:
    told = asdict(excerpt) | {"documents": documents}
    for part in told["parts"]:
        part["text"] = visible(part["text"], keep=KEPT)
    return told
