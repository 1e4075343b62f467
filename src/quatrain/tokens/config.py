"""Settings of what is written into a token store and of how it is read in training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quatrain.settings import Settings, option
from quatrain.text.tokenizer_json import EOT_TEXT
from quatrain.text.tokenizers import NAMES

Order = Literal["shuffle", "sequential", "random"]
Packing = Literal["concat", "document", "pad", "best_fit"]


@dataclass(frozen=True)
class DataConfig(Settings):
    """The `[data]` section of a recipe."""

    store: str = option("", "folder of the token store (--data sets it)")
    seq_len: int = option(1024, "ids in the inputs of one window", "tokens")
    order: Order = option(
        "shuffle", "shuffle: every window once an epoch in random order; sequential; random: uniform starts"
    )
    packing: Packing = option(
        "concat",
        "concat: windows cut from the stream; document: attention and positions restart at each document; best_fit: "
        "the same with whole documents packed into rows, few of them cut (Ding et al. 2024); pad: one document a row",
    )
    seed: int = option(1337, "seed of the order of the data")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that no run can have."""
        yield from self.at_least(1, ["seq_len"])
        yield from self.seed_in_range()


@dataclass(frozen=True)
class PrepareConfig(Settings):
    """What `prepare` does with documents; everything here but `workers` is part of the store's request."""

    tokenizer: str = option(
        "", "char, bytes, gpt2, or the path to a tokenizer.json; empty: gpt2, char for corpus:sonnets"
    )
    eot: str = option("<|endoftext|>", "the special token of a tokenizer.json that separates documents")
    text_column: str = option("text", "JSON key or parquet column that holds the text")
    val_fraction: float = option(0.005, "share of documents held out, chosen by a hash of text and seed")
    val_docs: tuple[int, ...] = option((), "0-based indices of the documents to hold out")
    val: tuple[str, ...] = option((), "files or folders whose documents are the validation split")
    val_tail: float = option(0.0, "share of a one-document corpus to cut off its end")
    shard_size: int = option(100_000_000, "ids in one file", "tokens")
    workers: int = option(1, "threads that tokenize")
    seed: int = option(1337, "seed of the choice of validation documents")
    name: str = option("", "first part of the shards' names; default: the first source's stem")
    skip_bad: bool = option(False, "count and list what cannot be read, and go on")
    allow_duplicates: bool = option(False, "take a file that is named twice, and keep equal documents")
    near_dedup: bool = option(False, "remove near-duplicates within train")
    cross_dedup: bool = option(True, "remove from train what is a near-duplicate of a validation document")
    near_threshold: float = option(0.6, "Jaccard similarity of 5-grams of ids from which documents are near-duplicates")
    decontaminate: tuple[str, ...] = option((), "JSONL files whose 13-grams of words no training document may hold")
    shuffle: int | None = option(None, "seed of a random order of the training documents; default: the sources' order")
    max_document_bytes: int = option(1 << 30, "longest document", "bytes")
    max_line_bytes: int = option(1 << 30, "longest line of a .jsonl", "bytes")
    max_ratio: float = option(1000.0, "most bytes out for each byte of a compressed file")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that no preparation can have."""
        yield from self.at_least(1, ["shard_size", "workers", "max_document_bytes", "max_line_bytes", "max_ratio"])
        if not 0 < self.near_threshold <= 1:
            yield f"near_threshold is {self.near_threshold}, it must be above 0 and at most 1"
        if self.shuffle is not None and not 0 <= self.shuffle < 2**63:
            yield f"shuffle is {self.shuffle}, it must be in 0 .. 2^63 - 1"
        if not 0 <= self.val_fraction < 1:
            yield f"val_fraction is {self.val_fraction}, it must be at least 0 and below 1"
        if not 0 <= self.val_tail < 1:
            yield f"val_tail is {self.val_tail}, it must be at least 0 and below 1"
        if any(index < 0 for index in self.val_docs):
            yield f"val_docs holds a negative index ({min(self.val_docs)}); the first document is 0"
        yield from self.seed_in_range()
        if self.eot != EOT_TEXT and self.tokenizer in ("", *NAMES):
            yield f"eot is {self.eot!r}, and the tokenizer {self.tokenizer or 'gpt2'} has {EOT_TEXT}; leave it out"
        rules = [bool(self.val_docs), bool(self.val), self.val_tail > 0]
        if sum(rules) > 1:
            yield "val_docs, val_tail and validation files each decide the split; give one of them"
        if not any(rules) and self.val_fraction == 0:
            yield "val_fraction 0 holds nothing out; give val_docs, val_tail, validation files, or a fraction above 0"
