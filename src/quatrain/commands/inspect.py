"""quatrain inspect: what is in a store, a run, or a model."""

import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import DataError, UsageError, did_you_mean

GPT2_VOCAB = 50257  # assumed where no store says otherwise


def inspect(
    target: Path | None = None,
    *settings: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    model: str | None = None,
    windows: int = 2,
    verify: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Show what is in a store or a run, or the parameters of a recipe's model.

    Parameters
    ----------
    target
        A token store, a run folder or a checkpoint folder.
    model
        A recipe: print its parameters' names, shapes on disk and counts. `--model.key value` changes it.
    windows
        Windows of a store to show as text.
    verify
        Read every file of the store and compare its hash.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    if model is not None:
        words = ([str(target)] if target is not None else []) + list(settings)
        return _inspect_model(model, words)
    if target is None or str(target).startswith("--"):
        raise UsageError("inspect needs a store, a run or a checkpoint folder, or --model RECIPE for settings")
    if settings:
        known = ["--model", "--windows", "--verify", "--json"]
        raise UsageError(f"no option {settings[0]}{did_you_mean(settings[0], known)}; settings need --model RECIPE")
    if windows < 0:
        raise UsageError(f"--windows is {windows}, it must be at least 0")
    if not target.exists():
        raise UsageError(f"{target}: no such folder; expected a store, a run or a checkpoint folder")
    if (target / "store.json").is_file() or (target / "prepare.json").is_file():
        return _inspect_store(target, windows, verify)
    return _inspect_run(target)


def _inspect_model(recipe: str, settings: list[str]) -> dict[str, Any]:
    from quatrain.model.pretrained import disk_shapes, layout_of, parameter_count
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


def _inspect_store(folder: Path, windows: int, verify: bool) -> dict[str, Any]:
    from quatrain.tokens.store import SPLITS, TokenStore

    store = TokenStore(folder)
    facts = store.facts
    tokenizer = facts["tokenizer"]
    say(f"{folder}: tokenizer {tokenizer['name']}, {tokenizer['vocab_size']:,} ids, eot {tokenizer['eot']}")
    for name in SPLITS:
        split = facts["splits"][name]
        say(
            f"  {name:<6}{split['documents']:>12,} documents{split['tokens']:>16,} ids{split['bytes']:>16,} bytes"
            f"  {len(split['shards'])} shards of {split['shards'][0]['dtype']}"
        )
    say(f"  split by {facts['split']}; {facts['counts']}; fingerprint {facts['fingerprint'][:16]}")
    say(f"  {facts['splits']['val'].get('share_in_train', 0):.2%} of sampled 32-token validation spans stand in train")
    if verify:
        damaged = list(store.damaged())
        if damaged:
            raise DataError("\n".join(damaged))
        say("  every file has the hash that store.json says")
    for number in range(windows):
        start = number * len(store.train) // max(windows, 1)
        ids = store.train[start : start + 48]
        say(f"  train[{start}:{start + len(ids)}] {store.tokenizer.decode(ids.tolist())!r}")
    return facts


def _inspect_run(folder: Path) -> dict[str, Any]:
    from quatrain.model.pretrained import layout_of, parameter_count, read_config
    from quatrain.training.checkpoint import checkpoints, find_checkpoint, read_state, run_of
    from quatrain.training.metrics import JsonLines

    checkpoint = find_checkpoint(folder, say)
    model = read_config(checkpoint)[0]
    parameters = parameter_count(model)
    run = run_of(checkpoint)
    metrics = JsonLines(run / "metrics.jsonl") if run else None
    step = read_state(checkpoint).step if run else 0
    trained = [row for row in metrics.trained() if row["step"] <= step] if metrics else []
    validated = [row for row in metrics.validated() if row["step"] <= step] if metrics else []
    say(f"{checkpoint}: {parameters:,} parameters, {layout_of(model).architecture or 'model_type quatrain'}")
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
