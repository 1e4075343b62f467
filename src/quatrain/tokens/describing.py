"""What store.json says of a store that has just been written."""

from typing import Any

import numpy as np

from quatrain.text.sources import Source
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.corpus import Corpus
from quatrain.tokens.deciding import Decisions, Fate
from quatrain.tokens.job import Job
from quatrain.tokens.store import VERSION, fingerprint, tokenizer_facts

EXAMPLE = 60  # ids of a document's beginning that an example shows


def described(
    job: Job, corpus: Corpus, decisions: Decisions, splits: dict[str, Any], hashes: list[str]
) -> dict[str, Any]:
    """The content of store.json; `hashes` are those of the sources' contents."""
    tokenizer = tokenizer_facts(job.tokenizer)
    rows = corpus.rows(len(job.sources))
    config = job.config
    return {
        "version": VERSION,
        "tokenizer": tokenizer,
        "splits": splits,
        "eot_style": "before",
        "sources": [
            {"name": source.name, **_content(source, hashed), "rows": count}
            for source, hashed, count in zip(job.sources, hashes, rows, strict=True)
        ],
        "split": _rule(config),
        "removal": {
            "exact": not config.allow_duplicates,
            "near": config.near_dedup,
            "cross": config.cross_dedup,
            "threshold": config.near_threshold,
            "benchmark": job.benchmark.describe() if job.benchmark else None,
        },
        "shuffle": config.shuffle,
        "counts": {
            "empty": corpus.total("empty"),
            "duplicates": decisions.count(Fate.DUPLICATE),
            "near_duplicates": decisions.count(Fate.NEAR_DUPLICATE),
            "near_validation": decisions.count(Fate.NEAR_VALIDATION),
            "contaminated": decisions.count(Fate.CONTAMINATED),
            "skipped": sum(corpus.bad().values()),
            "surrogates": corpus.total("surrogates"),
        },
        "skipped": corpus.bad(),
        "examples": [*(_example(job, corpus, one) for one in decisions.examples), *corpus.bad_examples()],
        "request": job.request(hashes),
        "fingerprint": fingerprint(tokenizer, splits),
    }


def _content(source: Source, hashed: str) -> dict[str, Any]:
    return {"revision": source.address.revision} if source.address else {"size": source.size, "sha256": hashed}


def _rule(config: PrepareConfig) -> dict[str, Any]:
    if config.val_tail:
        return {"rule": "tail", "share": config.val_tail}
    if config.val:
        return {"rule": "files"}
    if config.val_docs:
        return {"rule": "documents", "indices": list(config.val_docs)}
    return {"rule": "hash", "fraction": config.val_fraction, "seed": config.seed}


def _example(job: Job, corpus: Corpus, example: dict[str, Any]) -> dict[str, Any]:
    document = example["document"]
    ids = corpus.bare(np.array([document]))[0]
    text = job.tokenizer.decode(ids[:EXAMPLE].tolist())
    if job.benchmark and example["kind"] == "contaminated":
        text = job.benchmark.matched(job.tokenizer.decode(ids.tolist()).encode())
    return {
        "kind": example["kind"],
        "place": corpus.place(document),
        "like": corpus.place(example["like"]) if "like" in example else "",
        "jaccard": example.get("jaccard"),
        "text": text,
    }
