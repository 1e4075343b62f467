"""One prompt through the checkpoints of a run: what each of them makes of it."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quatrain.errors import ConfigError, QuatrainError
from quatrain.inference.config import SamplingConfig
from quatrain.inference.engine import Engine
from quatrain.inference.sampling import prompt_ids, write
from quatrain.model.pretrained import load_folder_tokenizer, load_model
from quatrain.training.checkpoint import checkpoints, restart_of
from quatrain.training.metrics import Row
from quatrain.web.fields import get, known_only, number, read_json, refusal_of, refuse_field, whole
from quatrain.web.refusals import shown

MAX_TOKENS = 256
PROMPT = 16_384  # characters
CHECKPOINTS = 20  # of more, so many are taken, evenly, with the first and the last
WAIT = 0.2  # seconds between two looks at whether the reader is still there
SETTINGS: dict[str, Callable[[str, Any], Any]] = {"max_tokens": whole, "temperature": number, "seed": whole}
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Asked:
    """What the reader wants to see."""

    run: str
    prompt: str
    config: SamplingConfig


def parse(body: bytes) -> Asked:
    """A request's body as what is asked for; raises `Refused` with the name of the first field that is wrong."""
    fields = read_json(body)
    known_only(fields, ["run", "prompt", *SETTINGS])
    run, prompt = (get(fields, name, _text, "") for name in ("run", "prompt"))
    if len(prompt) > PROMPT:
        refuse_field("prompt", f"prompt has {len(prompt):,} characters, it must have at most {PROMPT:,}")
    settings = {name: read(name, fields[name]) for name, read in SETTINGS.items() if fields.get(name) is not None}
    if settings.get("max_tokens", 0) > MAX_TOKENS:
        refuse_field("max_tokens", f"max_tokens is {settings['max_tokens']}, it must be at most {MAX_TOKENS} here")
    try:
        return Asked(run, prompt, SamplingConfig(**{"max_tokens": 64} | settings))
    except ConfigError as error:
        raise refusal_of(error) from error


def _text(name: str, value: Any) -> str:
    """A text that a tokenizer can read; a lone surrogate is none."""
    if not isinstance(value, str) or SURROGATE.search(value):
        refuse_field(name, f"{name} is {shown(value)}, expected a text")
    return value


class Left(Exception):
    """The reader is gone."""


class Through:
    """Writes with one checkpoint at a time, whoever asks, on the CPU: a training may need all of the GPU."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()

    def __call__(self, run: Path, asked: Asked, left: threading.Event) -> Iterator[Row]:
        """First how many checkpoints, then for each a row of step and text or error; ends when `left` is set."""
        taken = thinned(checkpoints(run))
        yield {"checkpoints": len(taken)}
        for step, folder in taken:
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
