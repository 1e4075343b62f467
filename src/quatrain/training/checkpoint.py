"""Checkpoints: a Hugging Face model folder with the trainer's state beside it, whole or absent.

A checkpoint is written into a temporary folder, fsynced, and renamed; its manifest, written last,
holds the sha256 of every file. The newest one whose manifest holds is the one that resumes.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quatrain.errors import DataError
from quatrain.files import sync_folder, writing
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT, VOCABULARY_TABLES
from quatrain.model.layouts import as_stored, spelled_once
from quatrain.model.pretrained import load_model, save_model, write_tensors
from quatrain.settings import Settings
from quatrain.text.tokenizers import Tokenizer
from quatrain.tokens.config import DataConfig
from quatrain.training.config import DECIDING, OptimConfig, TrainConfig
from quatrain.training.optim import optimizer_tensors, restore_optimizer

NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "trainer.safetensors", "trainer.json"}
STEP_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class TrainerState:
    """All that a resume needs beside weights and moments: the rest is a function of the step."""

    step: int  # updates done
    rows_consumed: int
    tokens: int
    seconds: float  # of training, over all parts of the run
    data_fingerprint: str
    tokenizer_sha256: str
    settings_sha256: str  # of the settings that decide which numbers follow
    next_batch: str  # hash of the windows of the next step
    scaler: dict[str, Any]  # of fp16; empty elsewhere


def check_ours(run: Path) -> None:
    """Raise `DataError` unless the folder is absent, empty, a run, or what a killed start or the demo left."""
    if run.exists() and not run.is_dir():
        raise DataError(f"{run}: a file; --out must be a folder that is absent, empty or our own")
    present = {path.name for path in run.iterdir()} if run.is_dir() else set()
    if "recipe.toml" in present:
        return
    if (run / "checkpoints").is_dir() and not any((run / "checkpoints").iterdir()):
        present.discard("checkpoints")
    foreign = sorted(name for name in present - {"store", "recipe.toml.tmp"} if not name.startswith("."))
    if foreign:
        raise DataError(f"{run} holds {foreign[0]} and is not a run of ours; choose another --out, nothing was touched")


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step_{step:08d}"


def save_checkpoint(
    run: Path, model: GPT, tokenizer: Tokenizer, optimizer: torch.optim.Optimizer, state: TrainerState
) -> Path:
    """Write the checkpoint of a step; an equal state gives equal bytes. Returns its folder."""
    folder = checkpoint_folder(run, state.step)
    temporary = folder.with_name(f".{folder.name}.tmp")
    with writing(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_model(model, tokenizer, temporary)
        write_tensors(temporary / "trainer.safetensors", optimizer_tensors(model, optimizer))
        (temporary / "trainer.json").write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
        manifest = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        (temporary / "manifest.json").write_text(json.dumps({"files": manifest}, indent=1) + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            with path.open("rb+") as file:  # Windows syncs only what may be written
                os.fsync(file.fileno())
        sync_folder(temporary)
        if folder.exists():  # a damaged one of the same step, or this very state
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)
    return folder


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Steps and folders of a run's checkpoints, oldest first, good or not."""
    parent = run / "checkpoints"
    found = [(STEP_FOLDER.fullmatch(path.name), path) for path in parent.iterdir()] if parent.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file has the hash that its manifest says."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        if not files.keys() >= NEEDED:
            return f"its manifest lacks {min(NEEDED - files.keys())}"
        for name, expected in files.items():
            if _sha256(folder / name) != expected:
                return f"{name} is not what its manifest says"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no whole manifest and files ({error})"
    return None


def newest_good(run: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose manifest holds; each newer one is reported with what is wrong with it."""
    for _, folder in reversed(checkpoints(run)):
        wrong = damage(folder)
        if wrong is None:
            return folder
        report(f"{folder}: {wrong}; falling back to the one before")
    return None


def find_checkpoint(path: Path, report: Callable[[str], None]) -> Path:
    """A checkpoint folder itself, or the newest good one of a run; raises `DataError` where there is none."""
    if (path / "config.json").is_file():
        wrong = damage(path) if (path / "manifest.json").is_file() else None
        if wrong is not None:
            raise DataError(f"{path}: {wrong}; take another checkpoint of the run")
        return _with_its_tokenizer(path)
    if (path / "store.json").is_file() and not (path / "checkpoints").is_dir():
        raise DataError(f"{path}: a token store, not a run; give the run that was trained on it")
    if not (path / "checkpoints").is_dir():
        found = "neither a run nor a checkpoint folder" if path.exists() else "no such run or checkpoint folder"
        raise DataError(f"{path}: {found}; quatrain train makes a run")
    folder = newest_good(path, report)
    if folder is None:
        raise DataError(f"{path}: no whole checkpoint in this run; give its train command again")
    return _with_its_tokenizer(folder)


def _with_its_tokenizer(checkpoint: Path) -> Path:
    """The same folder, if its tokenizer is the one of its training: with another one every text is another."""
    if (checkpoint / "trainer.json").is_file() and (checkpoint / "tokenizer.json").is_file():
        expected, found = read_state(checkpoint).tokenizer_sha256, _sha256(checkpoint / "tokenizer.json")
        if found != expected:
            raise DataError(
                f"{checkpoint}: its tokenizer.json is not the one that it was trained with (sha256 {found[:12]}, "
                f"expected {expected[:12]}); put that one back, it is also in the token store"
            )
    return checkpoint


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, if it does."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "recipe.toml").is_file() else None


def restart_of(checkpoint: Path, eot: int) -> int | None:
    """The id behind which the model begins anew, as its run trained it: eot, or None where windows cross documents."""
    run = run_of(checkpoint)
    if run is None:
        return None
    try:
        packing = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8")).get("data", {}).get("packing")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{run}/recipe.toml: cannot be read ({error})") from error
    return None if packing in (None, "concat") else eot


def read_state(folder: Path) -> TrainerState:
    """The trainer's part of a checkpoint."""
    try:
        return TrainerState(**json.loads((folder / "trainer.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}/trainer.json: not a trainer's state ({error})") from error


@torch.no_grad()
def restore(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and moments of a checkpoint into a model and its optimizer."""
    loaded = load_model(folder)
    if as_stored(loaded.config) != as_stored(model.config):
        raise DataError(f"{folder}: its model has other switches than this recipe's; give this recipe another --out")
    for name, weight in model.named_parameters():
        rows = slice(model.config.vocab_size) if name in VOCABULARY_TABLES else slice(None)
        weight[rows] = loaded.get_parameter(name)[rows].to(weight.device)
    if read_state(folder).step == 0:
        return  # nothing was updated, so there are no moments
    try:
        tensors = load_file(folder / "trainer.safetensors")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder}/trainer.safetensors: cannot be read ({error})") from error
    restore_optimizer(model, optimizer, tensors)


def settings_sha256(model: ModelConfig, optim: OptimConfig, data: DataConfig, train: TrainConfig) -> str:
    """Hash of the settings that decide which numbers a run computes; the others may change when it goes on."""
    content = {
        "model": changed(same_network(model)),
        "optim": changed(optim),
        "data": {name: value for name, value in changed(data).items() if name != "store"},
        "train": {name: value for name, value in changed(train).items() if name in DECIDING},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def changed(config: Settings) -> dict[str, Any]:
    """What is not at its default: a setting that a later version adds leaves the hash of older runs as it is."""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]  # all are dataclasses
    return {name: value for name, value in vars(config).items() if value != defaults[name]}


def same_network(config: ModelConfig) -> ModelConfig:
    """The switches that decide what is computed, each written in one way."""
    return replace(spelled_once(config), vocab_multiple=1)


def remove_leftovers(run: Path) -> None:
    """Remove what a killed save left."""
    for path in (run / "checkpoints").glob(".step_*.tmp"):
        shutil.rmtree(path)


def prune(run: Path, keep_last: int, keep_every: int, keep_steps: Iterable[int]) -> None:
    """Remove checkpoints that no rule keeps; nothing, unless the newest one is whole."""
    present = checkpoints(run)
    if not present or damage(present[-1][1]) is not None:
        return
    kept = {step for step, _ in present[-keep_last:]} | set(keep_steps)
    for step, folder in present:
        if step not in kept and not (keep_every and step % keep_every == 0):
            with contextlib.suppress(FileNotFoundError):  # someone else removed it: that is what we want
                shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
