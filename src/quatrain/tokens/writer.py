"""Documents to a token store: `prepare`.

The input is cut into units, each tokenized into parts on disk (`tokenizing`); when all are there, it is decided
which documents go where (`deciding`), and those that stay are written into shards (`assembling`). A document
begins with eot and a split ends with one more.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from quatrain.errors import DataError, QuatrainError
from quatrain.files import replace_file
from quatrain.text.reading import chunks, parse
from quatrain.text.rows import Rows
from quatrain.text.sources import content_hash
from quatrain.tokens.assembling import Assembly
from quatrain.tokens.claim import TASK, Claim, Unfinished
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.corpus import Corpus
from quatrain.tokens.deciding import Decisions, Fate, decide
from quatrain.tokens.describing import described
from quatrain.tokens.encoding import Encoder, dtype_of
from quatrain.tokens.job import Job
from quatrain.tokens.parts import NAME, finished_parts
from quatrain.tokens.store import TokenStore
from quatrain.tokens.tokenizing import Step, Tokenizing

Report = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much (0: not known)."""


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: Path | str,
    config: PrepareConfig | None = None,
    report: Report = lambda line: None,
    progress: Progress = lambda phase, done, of: None,
) -> dict[str, Any]:
    """Write a token store from documents and return what is in it (the keys of `prepare --json`).

    The same sources and options give the same bytes, whatever `workers` is and however often it was interrupted:
    an unfinished store of this request is gone on with, a finished one is left as it is.
    Raises `UsageError` for wrong input and `QuatrainError` when `out` cannot be written.
    """
    started = time.monotonic()
    job = Job.plan(_words(sources), Path(out), config or PrepareConfig(), report)
    claim = job.claim()
    if claim.finished(job.request):
        report(f"{out} already holds the store of this request")
    else:
        with claim:
            claim.remove_shards()  # they are written again, and their room is needed
            tokenize(job, claim, range(len(job.units)), report, progress)
            finish(job, claim, report, progress)
    return _summary(TokenStore(out), time.monotonic() - started)


def prepare_task(
    sources: str | Path | Sequence[str | Path],
    out: Path | str,
    config: PrepareConfig,
    task: tuple[int, int],
    report: Report = lambda line: None,
    progress: Progress = lambda phase, done, of: None,
) -> dict[str, Any]:
    """Do task number `task[0]` of `task[1]`: tokenize its share of the input; `finish_tasks` makes the store of them.

    Any number of tasks may run at once, on any machines that share the folder. Raises as `prepare` does.
    """
    started = time.monotonic()
    job = Job.plan(_words(sources), Path(out), config, report)
    mine = range(task[0], len(job.units), task[1])
    claim = job.claim(task)
    if claim.finished(job.request):
        report(f"{out} already holds the store of this request")
    else:
        with claim:
            tokenize(job, claim, mine, report, progress, task)
    return {"task": task[0], "of": task[1], "units": len(mine), "seconds": round(time.monotonic() - started, 3)}


def finish_tasks(
    sources: str | Path | Sequence[str | Path],
    out: Path | str,
    config: PrepareConfig,
    report: Report = lambda line: None,
    progress: Progress = lambda phase, done, of: None,
) -> dict[str, Any]:
    """Make the store of what tasks have tokenized, byte for byte that of `prepare`.

    Raises `Unfinished` if the work of a task is missing, and removes nothing.
    """
    started = time.monotonic()
    job = Job.plan(_words(sources), Path(out), config, report)
    claim = job.claim()
    if claim.finished(job.request):
        report(f"{out} already holds the store of this request")
    else:
        with claim:
            finish(job, claim, report, progress, check=True)
    return _summary(TokenStore(out), time.monotonic() - started)


def _words(sources: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(word) for word in ([sources] if isinstance(sources, str | Path) else sources)]


def tokenize(
    job: Job, claim: Claim, mine: Sequence[int], report: Report, progress: Progress, task: tuple[int, int] = (0, 1)
) -> None:
    """Tokenize the numbered units into parts, and hash the sources that begin in them."""
    sizes = [span.size for unit in mine for span in job.units[unit].spans]
    total = sum(sizes) if all(sizes) else 0
    new = [unit for unit in mine if not (claim.parts / NAME.format(unit=unit, number=0)).exists()]
    room = sum(span.size for unit in new for span in job.units[unit].spans) // 4
    _check_room(job.out, room, "at least, for ids on their way")
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress("tokenizing", done, total)

    encoder = Encoder(job.tokenizer, job.reading, job.config.seed, job.benchmark)
    tokenizing = Tokenizing(job.units, encoder, claim.parts, job.config.workers, count)
    begun = {source: unit for unit in reversed(range(len(job.units))) for source in job.units[unit].sources}
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        wanted = {source for source, unit in begun.items() if unit in mine}
        hashes = {source: thread.submit(content_hash, job.sources[source], stop) for source in sorted(wanted)}
        try:
            tokenizing.run(mine, (lambda units: _tail(job, report)) if job.config.val_tail else None)
            found = {source: future.result() for source, future in hashes.items()}
        except BaseException:
            stop.set()
            raise
    replace_file(claim.parts / (TASK.format(*task) + ".json"), json.dumps({"hashes": found}).encode())
    job.tokenizer.forget()  # what comes now needs room of its own


def _tail(job: Job, report: Report) -> Iterator[Step]:
    """The one document of a corpus in two: its beginning, and the tail that is validation."""
    read = []
    for number, span in enumerate(job.units[0].spans):
        for chunk in chunks(span, job.reading):
            read.append((number, chunk, parse(span, chunk, job.reading)))
    texts = [text for _, _, rows in read for text in rows.texts if text]
    if len(texts) != 1:
        raise DataError(
            f"--val-tail cuts one document, and there are {len(texts)}; hold out whole documents with "
            f"--val-fraction, --val-docs or --val"
        )
    for number, chunk, rows in read:
        cut = _cut(rows, job.config.val_tail, report)
        yield Step(0, number, chunk._replace(parse=partial(_same, cut)))
    yield Step(0, 0, None)


def _same(rows: Rows) -> Rows:
    return rows


def _cut(rows: Rows, share: float, report: Report) -> Rows:
    cut = Rows(bad=rows.bad, surrogates=rows.surrogates)
    for row, utf8 in zip(rows.rows, rows.texts, strict=True):
        text = utf8.decode()
        place = int((1 - Decimal(str(share))) * len(text))  # exact: in floats 1 - 0.9 is below 0.1
        if text:
            report(
                f"warning: --val-tail splits a document at character {place:,} of {len(text):,}: the two sides are "
                f"neighbours, so validation is a little easier than on an unseen document"
            )
        for part in (text[:place], text[place:]) if text else (text,):
            cut.texts.append(part.encode())
            cut.rows.append(row)
    return cut


def finish(job: Job, claim: Claim, report: Report, progress: Progress, check: bool = False) -> None:
    """Decide over all parts, write the shards, and store.json last. Raises `Unfinished` if parts are missing.

    With `check` parts are read whole first: those of this process are as it wrote them, those of others may not be.
    """
    parts, missing = finished_parts(claim.parts, len(job.units), check)
    if missing:
        raise Unfinished(_what_is_missing(claim, missing))
    corpus = Corpus(job.units, parts, dtype_of(job.tokenizer))
    decisions = decide(corpus, job.config, job.trained, report)
    _check_documents(job, corpus, decisions)
    staying = decisions.fates <= Fate.VAL
    ids = int(corpus.tokens[staying].sum()) + int(staying.sum())
    claim.remove_shards()
    # Not before: tasks that start together would write it at once.
    replace_file(job.out / "tokenizer.json", job.tokenizer.json)
    _check_room(job.out, ids * corpus.dtype.itemsize + 8 * int(staying.sum()), "for the shards")
    splits = Assembly(corpus, decisions, job.config, job.tokenizer, job.out, job.name, progress).run()
    for split, facts in splits.items():
        report(_shards_told(split, facts["shards"], job.config.shard_size))
    _check_documents(job, corpus, decisions)
    if job.look() != job.looks:
        raise DataError("a source has changed while it was read; give the same command again")
    hashes = _hashes(job, claim)
    facts = described(job, corpus, decisions, splits, hashes)
    replace_file(job.out / "store.json", (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())
    claim.clear_progress()


def _shards_told(split: str, shards: list[dict[str, Any]], size: int) -> str:
    last = shards[-1]["tokens"]
    partial = f"last shard partial: {last:,} tokens" if last < size else "the last one full"
    return f"{split}: {len(shards)} shard{'s' if len(shards) > 1 else ''}, {partial}, done"


def _what_is_missing(claim: Claim, missing: list[int]) -> str:
    done = sorted(path.stem for path in claim.parts.glob("task_*.json"))
    of = int(done[0][-5:]) if done else 0
    tasks = sorted({unit % of for unit in missing}) if of else []
    which = f"run --task {tasks[0]}/{of} first" if tasks else "run the tasks first, such as --task 0/8"
    return f"{claim.folder}: {len(missing)} units of the input are not tokenized yet; {which}, or leave --finish out"


def _check_documents(job: Job, corpus: Corpus, decisions: Decisions) -> None:
    train, val = decisions.count(Fate.TRAIN), decisions.count(Fate.VAL)
    empty, bad = corpus.total("empty"), sum(corpus.bad().values())
    first = job.sources[0].path
    if not len(corpus):
        files = f"{len(job.sources)} files" if len(job.sources) > 1 else f"{first}"
        skipped = f", {bad} skipped" if bad else ""
        raise DataError(f"no document with text in {files} ({empty} empty{skipped}); expected at least one")
    if len(corpus) == 1:
        raise DataError(
            f"{first} holds one document (a .txt file is one), which cannot be split by documents: "
            f"cut its end off with --val-tail 0.1, or give validation files with --val"
        )
    lacking = "train" if not train else "val" if not val else ""
    if lacking:
        kinds = {fate.name.lower().replace("_", "-"): decisions.count(fate) for fate in Fate if fate > Fate.VAL}
        left_out = "".join(f", {count} left out as {kind}" for kind, count in kinds.items() if count)
        raise DataError(
            f"the {lacking} split has no document ({train} train, {val} val{left_out}; the same text is always in the "
            f"same split); hold out others with --val-docs or --val, cut a one-document corpus with --val-tail 0.1, or "
            f"keep more with --no-cross-dedup or --allow-duplicates"
        )


def _check_room(folder: Path, need: int, purpose: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise QuatrainError(
            f"{folder}: {need:,} bytes are needed {purpose}, and {free:,} are free; make room or choose another "
            f"--out, then give the same command again: what is complete stays complete"
        )


def _hashes(job: Job, claim: Claim) -> list[str]:
    known: dict[str, str] = {}
    for path in claim.parts.glob("task_*.json"):
        known |= json.loads(path.read_bytes())["hashes"]
    return [known.get(str(number)) or content_hash(source) for number, source in enumerate(job.sources)]


def _summary(store: TokenStore, seconds: float) -> dict[str, Any]:
    return {
        **store.sizes(),
        **store.facts["counts"],
        "seconds": round(seconds, 3),
        "fingerprint": store.fingerprint,
    }
