"""Settings of what is taken over from other programs and of what is written for them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quatrain.settings import Settings, option

HeaderlessDtype = Literal["", "uint16", "uint32"]
ShardFormat = Literal["llmc", "npy", "megatron"]


@dataclass(frozen=True)
class AdoptConfig(Settings):
    """How `adopt` reads a folder of shards; everything here but `overlap` is part of the store's request."""

    tokenizer: str = option("", "gpt2, bytes, char, or the path to a tokenizer.json; empty: the folder's own")
    eot: str = option("<|endoftext|>", "the special token of a tokenizer.json that separates documents")
    chars_from: str = option("", "the text whose characters, sorted, are the ids (tokenizer char)")
    dtype: HeaderlessDtype = option("", "of .bin files without a header; empty: uint16 if the vocabulary fits")
    files: str = option("*", "which files of the folder are taken, by a pattern of their names")
    val_files: str = option("", "which of them are validation, whatever their names say")
    name: str = option("", "first part of the names of what is written; default: the folder's name")
    overlap: bool = option(False, "compute the share of validation spans that stand in train")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that no adoption can have."""
        if self.chars_from and self.tokenizer not in ("", "char"):
            yield f"chars_from makes the tokenizer char, and the tokenizer is {self.tokenizer}; leave one out"
        if self.tokenizer == "char" and not self.chars_from:
            yield (
                "chars_from is missing: the ids of tokenizer char are the sorted characters of a text; name the text "
                "that the shards were made from (nanoGPT's input.txt)"
            )


@dataclass(frozen=True)
class ShardsConfig(Settings):
    """How a store is written as shards for another program."""

    to: ShardFormat = option("llmc", "llmc, npy or megatron")
    shard_size: int = option(100_000_000, "ids in one file (megatron: one file a split)", "tokens")
    name: str = option("", "first part of the files' names; default: the store's")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that no export can have."""
        yield from self.at_least(1, ["shard_size"])
