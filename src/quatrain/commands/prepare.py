"""quatrain prepare: text to a token store."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, UsageError
from quatrain.tokens.config import PrepareConfig

DEFAULTS = PrepareConfig()
NOTICED = {
    "empty": "empty documents",
    "duplicates": "documents of a text that stood before",
    "near_validation": "documents too much like validation",
    "near_duplicates": "near-duplicates",
    "contaminated": "documents that share a passage with a benchmark",
    "skipped": "documents that cannot be read",
    "surrogates": "lone surrogates (now U+FFFD)",
}
Flag = Annotated[bool, Parameter(negative=())]
Words = Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())]


def prepare(
    *sources: str,
    out: Path,
    tokenizer: str | None = None,
    text_column: str = DEFAULTS.text_column,
    val_fraction: float = DEFAULTS.val_fraction,
    val_docs: str | None = None,
    val: Words = None,
    val_tail: float = DEFAULTS.val_tail,
    shard_size: int = DEFAULTS.shard_size,
    workers: int | None = None,
    seed: int = DEFAULTS.seed,
    name: str = DEFAULTS.name,
    eot: str = DEFAULTS.eot,
    skip_bad: Flag = False,
    allow_duplicates: Flag = False,
    near_dedup: Flag = False,
    no_cross_dedup: Flag = False,
    near_threshold: float = DEFAULTS.near_threshold,
    decontaminate: Words = None,
    shuffle: int | None = None,
    max_document_bytes: int = DEFAULTS.max_document_bytes,
    max_line_bytes: int = DEFAULTS.max_line_bytes,
    max_ratio: float = DEFAULTS.max_ratio,
    task: str | None = None,
    finish: Flag = False,
    engine: Literal["threads", "ray"] = "threads",
    tasks: int = 0,
    json: Flag = False,
) -> dict[str, Any]:
    """Tokenize text into a store that `train` reads; after an interruption the same command goes on.

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
        Threads that tokenize. Default: one for each logical core, at most 16.
    seed
        Seed of the choice of validation documents.
    name
        First part of the shards' names. Default: the first source's stem.
    eot
        The special token of a tokenizer.json that separates documents.
    skip_bad
        Count and list what cannot be read, and go on.
    allow_duplicates
        Take files named twice or of equal content, and keep equal documents (but not across the splits).
    near_dedup
        Remove near-duplicates within train as well.
    no_cross_dedup
        Keep training documents that are near-duplicates of validation documents.
    near_threshold
        Jaccard similarity of token 5-grams from which documents are near-duplicates.
    decontaminate
        JSONL files (HellaSwag and others) whose 13-grams of words no training document may hold.
    shuffle
        Seed of a random order of the training documents. Default: the order of the sources.
    max_document_bytes
        A longer document is bad.
    max_line_bytes
        A longer line of a .jsonl is bad.
    max_ratio
        A compressed file that grows to more than so many times its size is bad.
    task
        Do one share of the work, such as 3/64 (0/64 to 63/64), into the shared folder --out.
    finish
        Make the store of what all tasks have done.
    engine
        threads of this machine, or ray: tasks on the Ray cluster that RAY_ADDRESS names, else on this machine.
    tasks
        Number of tasks on Ray. Default: four for each of its cores.
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
            workers=workers if workers is not None else min(16, os.cpu_count() or 1),
            seed=seed,
            name=name,
            skip_bad=skip_bad,
            allow_duplicates=allow_duplicates,
            near_dedup=near_dedup,
            cross_dedup=not no_cross_dedup,
            near_threshold=near_threshold,
            decontaminate=tuple(decontaminate or ()),
            shuffle=shuffle,
            max_document_bytes=max_document_bytes,
            max_line_bytes=max_line_bytes,
            max_ratio=max_ratio,
        )
        share = _task(task, config, finish)
        if tasks < 0 or (tasks and engine != "ray"):
            raise ConfigError([f"tasks is {tasks}, expected at least 1, with engine ray"])
        if engine == "ray" and (share or finish or config.val_tail):
            raise ConfigError(["engine ray does all tasks and finishes; give it without task, finish and val_tail"])
    except ConfigError as error:
        raise error.as_flags() from None
    done = _run(sources, out, config, share, finish, tasks if engine == "ray" else None)
    if share:
        say(f"{out}: task {share[0]}/{share[1]} is done, {done['units']} units in {done['seconds']:.1f} s")
    else:
        _tell(out, done)
    return done


def _run(
    sources: tuple[str, ...],
    out: Path,
    config: PrepareConfig,
    share: tuple[int, int] | None,
    finish: bool,
    tasks_on_ray: int | None,
) -> dict[str, Any]:
    from quatrain.tokens.progress import Bars
    from quatrain.tokens.writer import finish_tasks, prepare_task
    from quatrain.tokens.writer import prepare as write_store

    with Bars() as bars:
        if share:
            return prepare_task(sources, out, config, share, bars.say, bars)
        if tasks_on_ray is not None:
            from quatrain.interop.ray_tasks import prepare_on_ray

            return prepare_on_ray(sources, out, config, tasks_on_ray, bars.say, bars)
        return (finish_tasks if finish else write_store)(sources, out, config, bars.say, bars)


def _tell(out: Path, done: dict[str, Any]) -> None:
    say(
        f"{out}: {done['documents']:,} documents, {done['train_tokens']:,} train and {done['val_tokens']:,} val ids "
        f"(every eot counted) in {done['seconds']:.1f} s"
    )
    found = [f"{done[kind]:,} {words}" for kind, words in NOTICED.items() if done[kind]]
    if found:
        say(f"noticed: {', '.join(found)} (examples: quatrain inspect {out})")


def _task(text: str | None, config: PrepareConfig, finish: bool) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not number < of <= 99_999:
        raise ConfigError([f"task is '{text}', expected a number and how many there are, from 0/64 to 63/64"])
    if finish or config.val_tail:
        raise ConfigError(["task does one share of the work; give it without --finish and --val-tail"])
    return number, of


def _indices(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError([f"val_docs is '{text}', expected indices such as 7 or 3,5"]) from error
