"""quatrain prepare: text to a token store."""

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, UsageError
from quatrain.tokens.config import PrepareConfig

DEFAULTS = PrepareConfig()


def prepare(
    *sources: str,
    out: Path,
    tokenizer: str | None = None,
    text_column: str = DEFAULTS.text_column,
    val_fraction: float = DEFAULTS.val_fraction,
    val_docs: str | None = None,
    val: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    val_tail: float = DEFAULTS.val_tail,
    shard_size: int = DEFAULTS.shard_size,
    workers: int | None = None,
    seed: int = DEFAULTS.seed,
    name: str = DEFAULTS.name,
    eot: str = DEFAULTS.eot,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Tokenize text into a store that `train` reads.

    Parameters
    ----------
    sources
        Files (.txt: one document; .jsonl, .parquet: one a row; each also .gz or .zst), folders, globs,
        or corpus:sonnets.
    out
        Folder of the store: absent, empty, or our own.
    tokenizer
        char, bytes, gpt2, or the path to a tokenizer.json. Default: gpt2; char for corpus:sonnets.
    text_column
        JSON key or parquet column that holds the text.
    val_fraction
        Share of documents held out for validation, chosen by a hash of text and seed.
    val_docs
        0-based indices of the documents to hold out, such as 7 or 3,5.
    val
        Files or folders whose documents are the validation split.
    val_tail
        Share to cut off the end of a one-document corpus.
    shard_size
        Ids in one file.
    workers
        Threads that tokenize. Default: half of the logical cores, at least one.
    seed
        Seed of the choice of validation documents.
    name
        First part of the shards' names. Default: the first source's stem.
    eot
        The special token of a tokenizer.json that separates documents.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    if not sources:
        raise UsageError("prepare needs a source: a file, a folder, a glob, or corpus:sonnets")
    try:
        config = PrepareConfig(
            tokenizer=tokenizer or DEFAULTS.tokenizer,
            eot=eot,
            text_column=text_column,
            val_fraction=val_fraction,
            val_docs=_indices(val_docs),
            val=tuple(val or ()),
            val_tail=val_tail,
            shard_size=shard_size,
            workers=workers if workers is not None else max(1, (os.cpu_count() or 2) // 2),
            seed=seed,
            name=name,
        )
    except ConfigError as error:
        raise error.as_flags() from None
    from quatrain.tokens.writer import prepare as write_store

    done = write_store(sources, out, config, say)
    say(
        f"{out}: {done['documents']:,} documents, {done['train_tokens']:,} train and {done['val_tokens']:,} val ids "
        f"(every eot counted) in {done['seconds']:.1f} s"
    )
    left_out = [f"{done[kind]:,} {kind}" for kind in ("empty", "duplicates", "surrogates") if done[kind]]
    if left_out:
        say(f"noticed: {', '.join(left_out)}")
    return done


def _indices(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError([f"val_docs is '{text}', expected indices such as 7 or 3,5"]) from error
