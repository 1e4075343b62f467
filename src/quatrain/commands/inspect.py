"""quatrain inspect: what is in a store, a run, or a model."""

import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import UsageError, did_you_mean

GPT2_VOCAB = 50257  # assumed where no store says otherwise


def inspect(
    target: Path | None = None,
    *settings: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    model: str | None = None,
    seq_len: int = 1024,
    windows: int = 3,
    all: Annotated[bool, Parameter(negative=())] = False,
    verify: Annotated[bool, Parameter(negative=())] = False,
    html: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Show what is in a store or a run, or the parameters of a recipe's model.

    Parameters
    ----------
    target
        A token store, a run folder or a checkpoint folder.
    model
        A recipe: print its parameters' names, shapes on disk and counts. `--model.key value` changes it.
    seq_len
        Length of the rows for which a store's padding is told, and of its windows.
    windows
        Windows of a store to show as text.
    all
        Read all ids of a store; else a split of more than 16,777,216 is told by a sample.
    verify
        Read every file of the store and compare its hash.
    html
        Write what is in the store as one HTML file too, with plots; it needs no network.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    if model is not None:
        words = ([str(target)] if target is not None else []) + list(settings)
        return _inspect_model(model, words)
    if target is None or str(target).startswith("--"):
        raise UsageError("inspect needs a store, a run or a checkpoint folder, or --model RECIPE for settings")
    if settings:
        known = ["--model", "--seq-len", "--windows", "--all", "--verify", "--html", "--json"]
        raise UsageError(f"no option {settings[0]}{did_you_mean(settings[0], known)}; settings need --model RECIPE")
    if windows < 0:
        raise UsageError(f"--windows is {windows}, it must be at least 0")
    if seq_len < 1:
        raise UsageError(f"--seq-len is {seq_len}, it must be at least 1")
    if not target.exists():
        raise UsageError(f"{target}: no such folder; expected a store, a run or a checkpoint folder")
    if (target / "store.json").is_file() or (target / "prepare.json").is_file():
        return _inspect_store(target, seq_len, windows, all, verify, html)
    if html or verify or all:
        raise UsageError(f"{target} is no token store (no store.json), and --html, --verify and --all are for stores")
    return _inspect_run(target)


def _inspect_model(recipe: str, settings: list[str]) -> dict[str, Any]:
    from quatrain.model.layouts import layout_of
    from quatrain.model.pretrained import disk_shapes, parameter_count
    from quatrain.recipes.resolve import resolve

    config = resolve(recipe, settings)[0]
    shape = config.model
    if not shape.vocab_size:
        shape = config.with_values("model", vocab_size=GPT2_VOCAB).model
        say(f"vocab_size is the store's; assuming {GPT2_VOCAB:,} (GPT-2's)")
    shapes = disk_shapes(shape)
    for name, dimensions in shapes.items():
        say(f"{name:<40}{' x '.join(map(str, dimensions)):>16}{math.prod(dimensions):>14,}")
    parameters = parameter_count(shape)
    layout = layout_of(shape)
    say(f"{parameters:,} parameters; on disk: {layout.architecture or 'model_type quatrain'}")
    return {
        "parameters": parameters,
        "shapes": {name: list(dimensions) for name, dimensions in shapes.items()},
        "model_type": layout.model_type,
    }


def _inspect_store(
    folder: Path, seq_len: int, windows: int, everything: bool, verify: bool, html: Path | None
) -> dict[str, Any]:
    from quatrain.files import replace_file
    from quatrain.tokens.facts import store_facts
    from quatrain.tokens.store import TokenStore
    from quatrain.tokens.view import show_store

    if html and (html.suffix not in (".html", ".htm") or not html.parent.is_dir()):  # never a file of the store
        raise UsageError(f"--html {html}: expected a name that ends in .html, in a folder that exists")
    facts = store_facts(TokenStore(folder), seq_len, windows, everything, verify)
    show_store(facts)
    if not html:
        return facts.json()
    from quatrain.web.store_page import store_page

    replace_file(html, store_page(facts).encode())
    say(f"\nthe same as a page: {html}")
    return facts.json() | {"html": str(html)}


def _inspect_run(folder: Path) -> dict[str, Any]:
    from quatrain.model.pretrained import parameter_count, read_config
    from quatrain.training.checkpoint import checkpoints, find_checkpoint, read_state, run_of
    from quatrain.training.metrics import JsonLines

    checkpoint = find_checkpoint(folder, say)
    model, layout = read_config(checkpoint)
    parameters = parameter_count(model)
    run = run_of(checkpoint)
    metrics = JsonLines(run / "metrics.jsonl") if run else None
    step = read_state(checkpoint).step if run else 0
    trained = [row for row in metrics.trained() if row["step"] <= step] if metrics else []
    validated = [row for row in metrics.validated() if row["step"] <= step] if metrics else []
    say(f"{checkpoint}: {parameters:,} parameters, {layout.architecture or 'model_type quatrain'}")
    if trained:
        say(f"  step {trained[-1]['step']:,}, {trained[-1]['tokens']:,} tokens, train loss {trained[-1]['loss']:.4f}")
    for row in validated[-5:]:
        say(f"  step {row['step']:,}: validation loss {row['val_loss']:.4f} over {row['val_tokens']:,} tokens")
    steps = [step for step, _ in checkpoints(run)] if run else []
    say(f"  checkpoints: {', '.join(map(str, steps))}" if steps else "  a model folder without a run")
    return {
        "checkpoint": str(checkpoint),
        "parameters": parameters,
        "checkpoints": steps,
        "last": trained[-1] if trained else None,
        "last_validation": validated[-1] if validated else None,
    }
