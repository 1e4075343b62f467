"""One prompt through the checkpoints of a run: what each of them makes of it."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quatrain.errors import ConfigError, QuatrainError, UsageError
from quatrain.inference.config import SamplingConfig
from quatrain.inference.engine import Engine
from quatrain.inference.sampling import prompt_ids, write
from quatrain.model.pretrained import load_folder_tokenizer, load_model
from quatrain.settings import coerce
from quatrain.training.checkpoint import checkpoints, restart_of
from quatrain.training.metrics import Row

MAX_TOKENS = 256
PROMPT = 16_384  # characters
CHECKPOINTS = 20  # of more, so many are taken, evenly, with the first and the last
WAIT = 0.2  # seconds between two looks at whether the reader is still there
KINDS = {"max_tokens": int, "temperature": float, "seed": int}  # settings that the page gives


@dataclass(frozen=True)
class Asked:
    """What the reader wants to see."""

    run: str
    prompt: str
    config: SamplingConfig


def parse(body: bytes) -> Asked:
    """A request's body as what is asked for; raises `UsageError` with all that is wrong."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError("the request is not JSON; expected an object with run and prompt") from error
    if not isinstance(given, dict):
        raise UsageError("the request is not an object; expected one with run and prompt")
    mistakes: list[str] = []
    values = {key: _value(given, key, kind, mistakes) for key, kind in KINDS.items() if given.get(key) is not None}
    run, prompt = (_text(given, key, mistakes) for key in ("run", "prompt"))
    if len(prompt) > PROMPT:
        mistakes.append(f"prompt has {len(prompt):,} characters, it must have at most {PROMPT:,}")
    if (values.get("max_tokens") or 0) > MAX_TOKENS:
        mistakes.append(f"max_tokens is {values['max_tokens']}, it must be at most {MAX_TOKENS} here")
    if mistakes:
        raise ConfigError(mistakes)
    return Asked(run, prompt, SamplingConfig(**{"max_tokens": 64, **values}))


def _value(given: dict[str, Any], key: str, kind: type, mistakes: list[str]) -> Any:
    try:
        return coerce(given[key], kind)
    except ValueError as error:
        mistakes.append(f"{key} {error}"[:200])
        return None


def _text(given: dict[str, Any], key: str, mistakes: list[str]) -> str:
    """A text that the tokenizer can read; a lone surrogate is none."""
    value = _value({key: given.get(key, "")}, key, str, mistakes)
    return value if isinstance(value, str) else ""


class Left(Exception):
    """The reader is gone."""


class Through:
    """Writes with one checkpoint at a time, whoever asks, on the CPU: a training may need all of the GPU."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()

    def __call__(self, run: Path, asked: Asked, left: threading.Event) -> Iterator[Row]:
        """A row of step and text for each checkpoint, or of step and error; ends when `left` is set."""
        for step, folder in thinned(checkpoints(run)):
            try:
                text = self._in_turn(folder, asked, left)
            except Left:
                return
            except QuatrainError as error:  # such as a checkpoint that the training has just removed
                yield {"step": step, "error": str(error)}
            else:
                yield {"step": step, "text": text}

    def _in_turn(self, folder: Path, asked: Asked, left: threading.Event) -> str:
        while not self._one_at_a_time.acquire(timeout=WAIT):
            if left.is_set():
                raise Left
        try:
            return _continued(folder, asked, left)
        finally:
            self._one_at_a_time.release()


def thinned(found: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """At most `CHECKPOINTS` of a run's, the first and the last among them."""
    if len(found) <= CHECKPOINTS:
        return found
    return [found[place] for place in np.linspace(0, len(found) - 1, CHECKPOINTS).round().astype(int).tolist()]


def _continued(folder: Path, asked: Asked, left: threading.Event) -> str:
    def hear(number: int, text: str) -> None:
        if left.is_set():
            raise Left

    hear(0, "")
    model, tokenizer = load_model(folder), load_folder_tokenizer(folder)
    ids = prompt_ids(tokenizer, asked.prompt, model.config.block_size, asked.config)
    engine = Engine(model, restart=restart_of(folder, tokenizer.eot))
    return write(engine, tokenizer, ids, asked.config, hear)[0].text
