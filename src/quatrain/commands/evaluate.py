"""quatrain evaluate: loss, perplexity and bits per byte of a run, tasks, and in-context probes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from quatrain.console import be_silent, progress, say
from quatrain.errors import ConfigError, DataError, UsageError

if TYPE_CHECKING:
    from quatrain.inference.ranks import Ranks
    from quatrain.inference.tasks import Given
    from quatrain.model.gpt import GPT
    from quatrain.recipes.config import RunConfig
    from quatrain.text.tokenizers import Tokenizer
    from quatrain.tokens.config import Packing

KEYS = ("loss", "perplexity", "bits_per_byte", "tokens", "seq_len", "packing", "fingerprint")  # None: not asked for


def evaluate(
    run: Path,
    *,
    data: Path | None = None,
    text: Path | None = None,
    split: Literal["val", "train"] | None = None,
    max_tokens: int | None = None,
    seq_len: int | None = None,
    stride: int | None = None,
    packing: Literal["concat", "document", "pad", "best_fit"] | None = None,
    by_position: Annotated[bool, Parameter(negative=())] = False,
    task: str = "",
    file: Path | None = None,
    items: int | None = None,
    lm_eval: str = "",
    probes: Annotated[bool, Parameter(negative=())] = False,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: str = "auto",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any] | None:
    """Score a whole split of a store, or a text file: every target once, in windows or in rows of documents.

    Under torchrun the processes share the work, and the first one prints.

    Parameters
    ----------
    run
        A run folder (its newest whole checkpoint is taken) or one checkpoint folder.
    data
        Folder of the token store. Default: the one that the run was trained on.
    text
        Score this file instead (.txt, .jsonl, .parquet, also .gz or .zst), tokenized as the run's data were.
    split
        val or train. Default: val.
    max_tokens
        Score only the first targets.
    seq_len
        Ids in the inputs of one window. Default: the run's data.seq_len.
    stride
        Let windows overlap: each scores its last so many targets, with more context, and takes longer.
    packing
        concat; document: attention and positions restart at each document; pad, best_fit: the same in rows of
        whole documents. Default: the run's.
    by_position
        Print the loss by the length of the context, too (--json always holds it).
    task
        Tasks to score, too, with commas between them: hellaswag, lambada, blimp, or a .jsonl of your own
        (docs/evaluate.md). Named ones come from the Hub, once, or from a file: hellaswag=FILE.
    file
        The data of the one task that --task names.
    items
        Score only the first questions of each task, and so many rows of each probe (50 if not given).
    lm_eval
        Tasks of lm-eval (extra eval), with commas between them, run in this process: hellaswag,arc_easy.
    probes
        Score what the model does from its prompt alone: repeating, copying, examples (docs/evaluate.md).
    precision
        fp32 or bf16.
    device
        auto, cpu, cuda, cuda:N or mps.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    from quatrain.inference.tasks import check_fit, named_tasks

    loaded = _load(run, device)
    if text is not None:
        _check_alone(text, data, split)
    how = _how(loaded, seq_len, max_tokens, stride, packing)
    if file is not None and (not task or "," in task or "=" in task):
        raise UsageError(f"--file {file} goes with one --task by its name, such as --task hellaswag")
    if items is not None and items < 1:
        raise ConfigError([f"--items is {items}, it must be at least 1"])
    harness = [word.strip() for word in lm_eval.split(",") if word.strip()]
    if items is not None and not (task or harness or probes):
        raise UsageError(f"--items {items} goes with --task, --lm-eval or --probes")
    given = named_tasks(task, file, items)
    for one in given:
        check_fit(one, loaded.tokenizer, loaded.model.config.block_size)
    if text is not None:
        result = _of_text(loaded, text, how, precision)
    else:
        result = _of_store(loaded, data, split or "val", how, precision, needed=not (given or harness or probes))
    if "loss" in result:
        say(_told(result, loaded.checkpoint, max_tokens))
        if by_position:
            say(_positions_told(result))
    if not result.pop("own_data"):
        say("  these data are not the store that the run was trained on")
    tasks = {one.task.name: _score_task(loaded, one, precision) for one in given}
    if harness:
        from quatrain.interop.harness import run_tasks

        tasks |= run_tasks(loaded.model, loaded.tokenizer, harness, items, precision, ranks=loaded.ranks)
        say(_harness_told(tasks, harness))
    if loaded.ranks.rank:
        return None
    probed = _score_probes(loaded, how.seq_len, items, precision) if probes else None
    return dict.fromkeys(KEYS) | result | {"tasks": tasks, "probes": probed, "checkpoint": str(loaded.checkpoint)}


def _check_alone(text: Path, data: Path | None, split: str | None) -> None:
    if data is not None:
        raise UsageError(f"--text {text} and --data {data}: one of them is scored; leave the other out")
    if split is not None:
        raise UsageError(f"--text {text} is scored whole and has no split; leave --split {split} out")


def _score_task(loaded: "_Loaded", given: "Given", precision: Literal["fp32", "bf16"]) -> dict[str, Any]:
    """Every score of a task, told as it comes. What is done of it is kept in the run until it is whole."""
    from quatrain.inference.memory import KeptAnswers
    from quatrain.inference.tasks import endings_of, evaluate_task
    from quatrain.training.checkpoint import run_of

    run = run_of(loaded.checkpoint)
    manifest = (loaded.checkpoint / "manifest.json").read_text(encoding="utf-8") if run else ""
    memory = KeptAnswers(run if run and os.access(run, os.W_OK) else None, manifest + loaded.model.device.type)
    with progress(given.task.name, endings_of(given, loaded.ranks.world_size)) as done:
        result = evaluate_task(loaded.model, loaded.tokenizer, given, precision, memory, done, ranks=loaded.ranks)
    assert result is not None
    memory.forget()
    say(_task_told(result))
    return result


def _score_probes(
    loaded: "_Loaded", context: int, items: int | None, precision: Literal["fp32", "bf16"]
) -> dict[str, Any]:
    """Every in-context probe that fits, told when all are done."""
    from quatrain.inference.forward import Forward
    from quatrain.inference.probes import ROWS, evaluate_probes, prepare_probes

    prepared = prepare_probes(loaded.tokenizer, loaded.model.config.vocab_size, context, items or ROWS)
    with progress("probes", prepared.ids) as done:
        result = evaluate_probes(Forward(loaded.model, precision), prepared, done)
    say(_probes_told(result))
    return result


def _probes_told(result: dict[str, Any]) -> str:
    lines = [
        f"probes: what it does from its prompt alone, {result['rows']:,} rows each, in at most "
        f"{result['context_length']:,} ids, {result['precision']}, data {result['data_hash'][:16]}",
        f"  in brackets: {result['baseline']}",
    ]
    for family, settings in result["scores"].items():
        lines += ["", *_family_told(family, settings)]
    left_out: dict[tuple[str, str], list[str]] = {}
    for family, reasons in result["left_out"].items():
        for setting, reason in reasons.items():
            left_out.setdefault((family, reason), []).append(setting)
    lines += [""] if left_out else []
    lines += [f"left out: {family}, {'; '.join(names)}: {reason}" for (family, reason), names in left_out.items()]
    return "\n".join(lines)


def _family_told(family: str, settings: dict[str, Any]) -> list[str]:
    """The methods of a family of probes, and a line for each setting."""
    names = list(next(iter(settings.values())))
    lines: list[str] = []
    for name in names:
        scores = [scores[name] for scores in settings.values()]
        what, _, said = scores[0]["method"].partition(": ")
        lines += [] if lines else [f"{family}: {what}"]
        chances = sorted({f"{score['chance']:.4f}" for score in scores})
        lines.append(f"  {name}: {said} (without the prompt {' .. '.join({chances[0]: 0, chances[-1]: 0})})")
    width = max(map(len, settings))
    head = "".join(f"  {name:25}" for name in names)
    lines.append(f"  {'':{width}}{head}  count  ids a row  data")
    for setting, row in settings.items():
        cells = "".join(f"  {_probe_cell(score):25}" for score in row.values())
        facts = row[names[0]]
        size = f"{facts['count']:>7,}  {facts['context_length']:>9,}  {facts['data_hash'][:16]}"
        lines.append(f"  {setting:{width}}{cells}{size}")
    return lines


def _probe_cell(score: dict[str, Any]) -> str:
    return f"{score['value']:.4f}{_error(score['standard_error'], 4)} ({score['baseline']:.4f})"


def _harness_told(tasks: dict[str, Any], names: list[str]) -> str:
    lines = []
    for name in (f"lm_eval:{name}" for name in names):
        for score, facts in tasks[name]["scores"].items():
            value = f"{facts['value']:.4f}{_error(facts['standard_error'], 4)}"
            lines.append(f"  {name:20} {score:16} {value:18} of {facts['count']:,}: {facts['method']}")
    return "\n".join(lines)


def _task_told(result: dict[str, Any]) -> str:
    cut = f", {result['truncated']:,} of them cut to that" if result["truncated"] else ""
    lines = [
        f"{result['task']}: {result['count']:,} questions, data {result['data_hash'][:16]}, seen in "
        f"{result['context_length']:,} ids{cut}, {result['precision']}"
    ]
    for name, score in result["scores"].items():
        value = f"{score['value']:.4f}{_error(score['standard_error'], 4)}"
        lines.append(f"  {name:20} {value:18} of {score['count']:,}: {score['method']}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Loaded:
    """A checkpoint and what its run says."""

    checkpoint: Path
    model: "GPT"
    tokenizer: "Tokenizer"
    trained: "RunConfig | None"
    fingerprint: str | None  # of the data it was trained on
    ranks: "Ranks"


@dataclass(frozen=True)
class _How:
    """How targets are scored."""

    seq_len: int
    packing: "Packing"
    max_tokens: int | None
    stride: int | None


def _load(run: Path, device: str) -> _Loaded:
    from quatrain.inference.ranks import join, own_device
    from quatrain.model.device import pick_device
    from quatrain.model.pretrained import load_folder_tokenizer, load_model
    from quatrain.recipes.resolve import resolve
    from quatrain.training.checkpoint import find_checkpoint, read_state, run_of

    ranks = join()
    if ranks.rank:
        be_silent()
    where = pick_device(own_device(device, ranks))
    checkpoint = find_checkpoint(run, say)
    trained_in = run_of(checkpoint)
    return _Loaded(
        checkpoint,
        load_model(checkpoint, where),
        load_folder_tokenizer(checkpoint),
        resolve(str(trained_in / "recipe.toml"))[0] if trained_in else None,
        read_state(checkpoint).data_fingerprint if trained_in else None,
        ranks,
    )


def _how(
    loaded: _Loaded, seq_len: int | None, max_tokens: int | None, stride: int | None, packing: "Packing | None"
) -> _How:
    """The settings of a pass, from the flags and the run. Raises `ConfigError` with all that is wrong in them."""
    trained, block_size = loaded.trained, loaded.model.config.block_size
    usual = trained.data.seq_len if trained else block_size
    length = usual if seq_len is None else seq_len
    packed = packing or (trained.data.packing if trained and stride is None else "concat")
    mistakes = []
    if not 1 <= length <= block_size:
        mistakes.append(f"--seq-len is {length}, it must be in 1 .. block_size {block_size}")
    elif stride is not None and not 1 <= stride <= length:
        mistakes.append(f"--stride is {stride}, it must be in 1 .. seq_len {length}")
    if stride is not None and packed != "concat":
        mistakes.append(f"--stride goes with --packing concat alone, not {packed}")
    if max_tokens is not None and max_tokens < 1:
        mistakes.append(f"--max-tokens is {max_tokens}, it must be at least 1")
    if mistakes:
        raise ConfigError(mistakes)
    return _How(length, packed, max_tokens, stride)


def _of_text(loaded: _Loaded, text: Path, how: _How, precision: Literal["fp32", "bf16"]) -> dict[str, Any]:
    from quatrain.inference.scoring import evaluate_text

    settings = (how.seq_len, how.packing, how.max_tokens, precision, how.stride, loaded.ranks)
    return evaluate_text(loaded.model, loaded.tokenizer, text, *settings) | {"own_data": True}


def _of_store(
    loaded: _Loaded,
    data: Path | None,
    split: Literal["val", "train"],
    how: _How,
    precision: Literal["fp32", "bf16"],
    needed: bool,
) -> dict[str, Any]:
    """The scores of a split; none where no data are known, and tasks were asked for."""
    from quatrain.inference.scoring import evaluate as score
    from quatrain.tokens.store import TokenStore

    folder = str(data or (loaded.trained.data.store if loaded.trained else ""))
    if not needed and data is None and not (folder and Path(folder).exists()):
        return {"own_data": True}
    if not folder:
        raise UsageError(
            f"{loaded.checkpoint} is not part of a run of ours, so its data are unknown; name a store with --data, or "
            f"a file with --text"
        )
    store = TokenStore(folder)
    if loaded.tokenizer.sha256 != store.tokenizer.sha256:
        raise DataError(
            f"{store.folder} was made with another tokenizer than {loaded.checkpoint}; prepare the text with that one"
        )
    settings = (how.seq_len, how.packing, how.max_tokens, precision, how.stride, loaded.ranks)
    result = score(loaded.model, store, split, *settings)
    return result | {"own_data": loaded.fingerprint in (None, store.fingerprint)}


def _told(result: dict[str, Any], checkpoint: Path, max_tokens: int | None) -> str:
    errors = result["standard_errors"]
    of, name = ("split", result["split"]) if result["split"] else ("file", result["text"])
    whole = f"the whole {of}" if max_tokens is None else f"at most {max_tokens:,} asked for"
    per_byte = (
        "n/a (the tokenizer's ids do not each stand for fixed bytes; score the whole split)"
        if result["bits_per_byte"] is None
        else f"{result['bits_per_byte']:.4f}{_error(errors['bits_per_byte'], 4)}  "
        f"(the nats of the eots counted, over {result['bytes']:,} bytes of text)"
    )
    store = f"store {result['fingerprint'][:16]}, " if result["fingerprint"] else ""
    return (
        f"{checkpoint}\n"
        f"  loss           {result['loss']:.4f}{_error(errors['loss'], 4)} nats per token\n"
        f"  perplexity     {result['perplexity']:.2f}{_error(errors['perplexity'], 2)}\n"
        f"  bits per byte  {per_byte}\n"
        f"  scored         {result['tokens']:,} targets of {name} ({whole}), "
        f"rows of {result['seq_len']}, {result['packing']}, {result['precision']}\n"
        f"  method         {result['method']}\n"
        f"  data           {store}ids {result['data_hash'][:16]}"
    )


def _positions_told(result: dict[str, Any]) -> str:
    lines = ["  ids before the target      loss                targets"]
    for row in result["by_position"]:
        context = f"{row['context_from']:,} .. {min(row['context_to'], result['seq_len']):,}"
        lines.append(f"  {context:>21}  {row['loss']:8.4f}{_error(row['standard_error'], 4):11} {row['tokens']:>13,}")
    return "\n".join(lines)


def _error(error: float | None, digits: int) -> str:
    return "" if error is None else f" ± {error:.{digits}f}"
