"""quatrain plan: memory, hours, cost, disk before the first step."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, UsageError
from quatrain.recipes.config import RunConfig
from quatrain.recipes.resolve import resolve

if TYPE_CHECKING:
    from quatrain.tokens.store import TokenStore
    from quatrain.training.plan import Planned, Speed

GPT2_VOCAB = 50257  # assumed where no store says otherwise
OWN = ("--gpu", "--gpus", "--data", "--calibrate", "--mfu", "--price", "--json")


def plan(
    recipe: str,
    *settings: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    gpu: Literal["h100", "h200", "a100", "4090", "cpu"] | None = None,
    gpus: int = 1,
    data: Path | None = None,
    calibrate: Annotated[bool, Parameter(negative=())] = False,
    mfu: float | None = None,
    price: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Tell what a run will take before its first step: memory, hours, cost, disk, data. Nothing is written.

    Parameters
    ----------
    recipe
        A built-in name (see: quatrain recipes) or a .toml file. `--section.key value` overrides it.
    gpu
        The device to plan for. Default: this machine's.
    gpus
        How many of them, each with all weights and a part of every step.
    data
        Folder of the token store: its vocabulary and its size. Without one the vocabulary is GPT-2's.
    calibrate
        Run 20 steps on this machine's device and take the speed from them.
    mfu
        Share of the device's peak that is reached, in place of the usual one.
    price
        USD for an hour of one device.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    config = _resolve(recipe, settings, data, list(_mistakes(gpus, mfu, price, calibrate)))
    store = _store(config)
    planned = _planned(config, gpu, gpus, store, calibrate)
    from quatrain.training.plan import plan as plan_run

    tokens = None if store is None else len(store.train)
    if calibrate:
        plan_run(planned, None, price, tokens)  # what cannot be is refused before it is tried
    facts = plan_run(planned, mfu, price, tokens, _measured(planned, config, store) if calibrate else None)
    if store is None and not config.model.vocab_size:
        say(f"vocab_size is the store's; assuming {GPT2_VOCAB:,} (GPT-2's)")
    for line in _told(facts):
        say(line)
    return facts


def _mistakes(gpus: int, mfu: float | None, price: float | None, calibrate: bool) -> Iterator[str]:
    if gpus < 1:
        yield f"--gpus is {gpus}, it must be at least 1"
    if mfu is not None and not 0 < mfu <= 1:
        yield f"--mfu is {mfu}, it must be above 0 and at most 1"
    if price is not None and not 0 <= price < math.inf:
        yield f"--price is {price}, it must be at least 0 and finite"
    if mfu is not None and calibrate:
        yield "--mfu and --calibrate both say how fast steps are; give one of them"


def _resolve(recipe: str, settings: tuple[str, ...], data: Path | None, mistakes: list[str]) -> RunConfig:
    """The recipe; its mistakes and those of the command's own options are told together."""
    extra: dict[str, Any] = {} if data is None else {"data.store": str(data.resolve())}
    try:
        config = resolve(recipe, settings, extra, also=OWN)[0]
    except ConfigError as error:
        raise ConfigError([*error.mistakes, *mistakes]) from error
    if mistakes:
        raise ConfigError(mistakes)
    return config


def _store(config: RunConfig) -> "TokenStore | None":
    if not config.data.store:
        return None
    from quatrain.tokens.store import TokenStore

    return TokenStore(config.data.store)


def _planned(config: RunConfig, gpu: str | None, gpus: int, store: "TokenStore | None", calibrate: bool) -> "Planned":
    import torch

    from quatrain.model.device import pick_precision
    from quatrain.training.flops import peak_flops
    from quatrain.training.machines import MACHINES, this_cpu
    from quatrain.training.plan import Planned

    own = _own_kind(config, needed=gpu is None or calibrate)
    if calibrate and gpu not in (None, own):
        raise UsageError(f"--calibrate measures this machine's device ({own}), not --gpu {gpu}; leave one of them out")
    kind = gpu or own
    if kind == "cpu":
        cpu = torch.device("cpu")
        precision = pick_precision(config.train.precision, cpu)
        peak = peak_flops(cpu, precision)
        machine = this_cpu({precision: peak} if peak else {})
        if gpus > 1:
            raise ConfigError([f"--gpus is {gpus}, and a plan for CPUs is for one machine; nearest: 1, or --gpu h100"])
    else:
        precision = "bf16" if config.train.precision == "auto" else config.train.precision
        machine = MACHINES[kind]
    fitted = config.for_vocabulary(store.vocab_size if store else config.model.vocab_size or GPT2_VOCAB)
    fitted = fitted.with_values("train", precision=precision)
    threads = torch.get_num_threads()
    return Planned(fitted.model, fitted.optim, fitted.data, fitted.train, machine, gpus, threads)


def _own_kind(config: RunConfig, needed: bool) -> str:
    """Which of the devices that can be planned for this machine has."""
    if not needed:
        return "cpu"
    import torch

    from quatrain.model.device import pick_device
    from quatrain.training.machines import named_like

    device = pick_device(config.device)
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind = named_like(name)
    if kind is None:
        raise UsageError(f"no figures of the device '{name}' are known here; say which is most like it with --gpu")
    return kind


def _measured(planned: "Planned", config: RunConfig, store: "TokenStore | None") -> "Speed":
    from quatrain.model.device import pick_device
    from quatrain.training.calibration import calibrate

    device = "cpu" if planned.cpu else config.device
    return calibrate(planned, pick_device(device), store)


def _told(facts: dict[str, Any]) -> Iterator[str]:
    """The plan for a person, a line a fact."""
    many = f"{facts['gpus']} x " if facts["gpus"] > 1 else ""
    yield f"{many}{facts['device']}, {facts['precision']}"
    for part in (_model, _memory, _time, _disk, _tokens, _between):
        yield from part(facts)


def _model(facts: dict[str, Any]) -> Iterator[str]:
    parameters, flops = facts["parameters"], facts["flops"]
    yield f"parameters      {parameters['total']:,}, {parameters['without_embeddings']:,} without embeddings"
    yield f"FLOPs           {flops['per_token']:.3e} a token, {flops['total']:.3e} in all ({flops['formula']})"


PARTS = {
    "weights": "fp32",
    "gradients": "fp32",
    "moments": "of the optimizer",
    "casts": "the weights in the precision of matrix products",
    "activations": "kept for backward, eager",
    "logits": "of one chunk, and its softmax",
    "loss": "gradients of hidden state and head, made in forward",
    "scratch": "gradients of activations in one block",
    "tables": "further gradients of the token embedding",
    "heap": "of the process, beyond its tensors",
}


def _memory(facts: dict[str, Any]) -> Iterator[str]:
    memory, batch = facts["memory"], facts["micro_batch"]
    usable = _size(memory["usable"])
    yield f"memory          {_size(memory['peak'])} at the peak, micro_batch {batch['recipe']}, of {usable}"
    for part, sentence in PARTS.items():
        if memory[part]:
            yield f"  {part:<14}{_size(memory[part]):>10}  {sentence}"
    yield "  not all of them are held at once; the peak is the most that is"
    yield (
        f"  checkpointed  {_size(memory['activations_checkpointed']):>10}  of activations, peak "
        f"{_size(memory['peak_checkpointed'])}: what it would be, blocks are not computed again yet"
    )
    yield (
        f"micro_batch     {batch['recipe']}, {batch['grad_accum_steps']} a step; the largest that fits and divides the "
        f"step: {batch['largest']} ({_size(batch['largest_needs'])})"
    )


def _time(facts: dict[str, Any]) -> Iterator[str]:
    time = facts["time"]
    if time["hours"] is None:
        yield f"hours           n/a: {time['source']}"
        return
    cost = "n/a: give --price" if time["cost"] is None else f"{time['cost']:,.2f} USD"
    reached = f", MFU {time['mfu']:.1%}" if time["mfu"] else ""
    yield (
        f"hours           {time['hours']:,.4g} of training steps, {time['seconds_per_step']:.4g} s a step, "
        f"{time['tokens_per_second']:,.0f} tokens/s{reached}"
    )
    yield f"  {time['source']}; evaluations, samples and saving are not counted"
    yield f"cost            {cost} for {time['gpu_hours']:,.4g} device hours"


def _disk(facts: dict[str, Any]) -> Iterator[str]:
    disk = facts["disk"]
    yield (
        f"checkpoints     {_size(disk['checkpoint'])} each ({_size(disk['weights'])} weights, {_size(disk['moments'])} "
        f"moments); {disk['kept']} kept: {_size(disk['run'])}, while saving {_size(disk['run_while_saving'])}"
    )
    of = "the run's tokens, read once" if facts["data"]["store_tokens"] is None else "the training split"
    yield f"store           {_size(disk['store'])} for {of}, {disk['bytes_per_id']} bytes an id"


def _tokens(facts: dict[str, Any]) -> Iterator[str]:
    data = facts["data"]
    yield (
        f"tokens          {data['tokens']:,}, {data['tokens_per_parameter']:.1f} a parameter "
        f"(20 would be {data['chinchilla_tokens']:,}; Hoffmann et al. 2022)"
    )
    if data["epochs"] is not None:
        many = "; beyond 4 a repetition is worth less and less (Muennighoff et al. 2023)" if data["many_epochs"] else ""
        yield f"epochs          {data['epochs']:.2f} of {data['store_tokens']:,} ids{many}"


def _between(facts: dict[str, Any]) -> Iterator[str]:
    sent, broken = facts["communication"], facts["interruptions"]
    if sent:
        seconds = sent["seconds_per_step"]
        how = f"{seconds * 1e3:.1f} ms over {sent['over']}" if seconds else f"time n/a over {sent['over']}"
        share = f", {sent['share_of_step']:.1%} of a step" if sent["share_of_step"] else ""
        yield f"communication   {_size(sent['bytes_per_step'])} sent by each a step, {how}{share}, beside the backward"
    if broken:
        yield (
            f"interruptions   {broken['expected']:.2g} expected, one in {broken['hours_between']:,.0f} h (419 in 54 "
            f"days on 16,384 GPUs; Grattafiori et al. 2024)"
        )
        yield (
            f"  each loses {broken['lost_hours_each']:.2g} h at this save_every; least is lost at "
            f"{broken['best_save_every']:,} steps (Young 1974), if a save takes {broken['seconds_to_save']:.1f} s"
        )


def _size(size: float | None) -> str:
    if size is None:
        return "an unknown size"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
