"""In-context probes of a finished model: what it can do from its prompt alone, beside what counting there can.

Every score carries its method, count, standard error, context length and data hash, the score of the n-gram baseline
on the same rows, and the chance of an answer that does not look at the prompt.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from quatrain.errors import UsageError
from quatrain.inference.endings import batches
from quatrain.inference.forward import Forward
from quatrain.inference.ngram import Said, counted
from quatrain.inference.predictions import predictions
from quatrain.inference.probe_kinds import make_probes
from quatrain.inference.probe_rows import Material, Measure, Probe, Row
from quatrain.inference.probe_words import words_of
from quatrain.inference.tally import Tally
from quatrain.text.tokenizers import Tokenizer

ROWS = 50  # of each probe


@dataclass(frozen=True)
class ProbeScore:
    """One number and all that it depends on: the mean of `count` things in `rows`, the units of its standard error."""

    value: float
    standard_error: float | None
    baseline: float
    chance: float
    count: int
    rows: int
    method: str
    context_length: int
    data_hash: str


@dataclass(frozen=True)
class Prepared:
    """Probes that fit a tokenizer and a context."""

    probes: list[Probe]
    left_out: dict[str, dict[str, str]]  # why, by family and setting
    material: Material
    context: int

    @property
    def ids(self) -> int:
        """How many ids a model reads in all: the total of `done`."""
        return sum(len(row.ids) for probe in self.probes for row in probe.rows)


def prepare_probes(tokenizer: Tokenizer, vocab_size: int, context: int, rows: int = ROWS, seed: int = 1337) -> Prepared:
    """The probes for a model of that vocabulary, in rows of at most `context` ids."""
    if rows < 1:
        raise UsageError(f"rows is {rows}, it must be at least 1")
    material = Material(tokenizer, words_of(tokenizer, vocab_size), rows, seed)
    return Prepared(*make_probes(material, context), material, context)


def evaluate_probes(
    forward: Forward, prepared: Prepared, done: Callable[[int], None] = lambda count: None
) -> dict[str, Any]:
    """The scores of every probe, by family and setting. `done` hears of the ids of each batch. Draws nothing."""
    rows = [row for probe in prepared.probes for row in probe.rows]
    answers = iter(ask(forward, rows, done))
    families: dict[str, dict[str, Any]] = {}
    for probe in prepared.probes:
        found = [next(answers) for _ in probe.rows]
        families.setdefault(probe.family, {})[probe.setting] = scored(probe, found, forward.config.vocab_size)
    hashes = "".join(probe.data_hash for probe in prepared.probes)
    return {
        "rows": prepared.material.count,
        "context_length": prepared.context,
        "precision": forward.dtype,
        "seed": prepared.material.seed,
        "data_hash": hashlib.sha256(hashes.encode()).hexdigest(),
        "baseline": "Witten-Bell n-grams of any order, counted in the prompt alone",
        "ordinary_ids": len(prepared.material.words.ids),
        "words": len(prepared.material.words.words),
        "scores": families,
        "left_out": prepared.left_out,
    }


def scored(probe: Probe, found: Sequence[Said], vocab_size: int) -> dict[str, Any]:
    """The scores of a probe by name, given what the model said of each row."""
    counts = [counted(row.ids, row.asked, vocab_size) for row in probe.rows]
    data_hash = probe.data_hash
    return {
        measure.name: asdict(_score(probe, measure, _tally(measure, found), _tally(measure, counts), data_hash))
        for measure in probe.measures
    }


def _score(probe: Probe, measure: Measure, model: Tally, baseline: Tally, data_hash: str) -> ProbeScore:
    value, beside = model.loss(0), baseline.loss(0)
    assert value is not None
    assert beside is not None
    return ProbeScore(
        value,
        model.standard_error(0),
        beside,
        measure.chance,
        int(model.targets[0]),
        len(probe.rows),
        f"{probe.said}: {measure.said}",
        probe.length,
        data_hash,
    )


def _tally(measure: Measure, found: Sequence[Said]) -> Tally:
    """Sums and numbers over rows, which are the units of the standard error."""
    tally = Tally(1)
    outcomes = np.array([measure.outcome(one) for one in found], dtype=np.float64)  # (rows, 2)
    tally.add(outcomes[:, :1], outcomes[:, 1:])
    return tally


def ask(forward: Forward, rows: Sequence[Row], done: Callable[[int], None] = lambda count: None) -> list[Said]:
    """What a model says of the ids that rows ask for, in their order."""
    found: dict[int, Said] = {}
    # The longest first: what does not fit in memory fails at once, and estimates err upwards.
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    for part in batches([len(rows[number].ids) for number in order], forward.device):
        numbers = order[part]
        found |= zip(numbers, _batch(forward, [rows[number] for number in numbers]), strict=True)
        done(sum(len(rows[number].ids) for number in numbers))
    return [found[number] for number in range(len(rows))]


@torch.inference_mode()
def _batch(forward: Forward, rows: list[Row]) -> list[Said]:
    """One forward over rows, the longest first; what pads the others stands behind all that is asked for."""
    T = len(rows[0].ids)
    ids = torch.tensor([[*row.ids, *[0] * (T - len(row.ids))] for row in rows], device=forward.device)
    hidden = forward.hidden(ids)  # (B T, C)
    places = [number * T + place for number, row in enumerate(rows) for place, _ in row.asked]
    targets = torch.tensor([wanted for row in rows for _, wanted in row.asked], device=forward.device)
    answers = predictions(forward, hidden[torch.tensor(places, device=forward.device)], targets)
    losses, greedy = (part.cpu().numpy().astype(np.float64) for part in answers)
    borders = np.cumsum([len(row.asked) for row in rows])[:-1]
    return [Said(*both) for both in zip(np.split(losses, borders), np.split(greedy, borders), strict=True)]
