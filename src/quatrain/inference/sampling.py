"""From a prompt to text: the next id from logits as pure functions, and the loop around them.

Every draw is a function of (seed, sample, position), so a sample does not depend on how many are
drawn beside it, and no generator has a state. The model sees the prompt's ids alone; an empty
prompt is one eot. Each step computes the whole row again: a cache takes its place here later.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quatrain.errors import DataError
from quatrain.inference.config import SamplingConfig
from quatrain.mixing import derive
from quatrain.model.device import Precision, autocast
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One continuation: its text and ids without the prompt, the eot or the stop text."""

    text: str
    ids: list[int]
    finish_reason: Literal["stop", "length"]


OnText = Callable[[int, str], None]  # the number of the sample, and the text that has become certain


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str = "",
    config: SamplingConfig | None = None,
    precision: Precision = "fp32",
    on_text: OnText = lambda number, text: None,
) -> list[Sample]:
    """Samples of a prompt's continuation, each ending at eot, a stop text, max_tokens or block_size.

    `on_text` is called with every piece of text as soon as it is certain. The model's mode is put
    back afterwards. Raises `DataError` for a prompt longer than block_size.
    """
    config = config or SamplingConfig()
    prompt_ids = tokenizer.encode(prompt).tolist() or [tokenizer.eot]
    room = model.config.block_size - len(prompt_ids)
    if room < 0:
        raise DataError(
            f"the prompt has {len(prompt_ids):,} ids, the model sees at most {model.config.block_size:,}; shorten it"
        )
    limit = min(config.max_tokens, room)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), autocast(model.device, precision):
            return [
                _one_sample(model, tokenizer, prompt_ids, limit, config, number, on_text) for number in range(config.n)
            ]
    finally:
        model.train(was_training)


def _one_sample(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    limit: int,
    config: SamplingConfig,
    number: int,
    on_text: OnText,
) -> Sample:
    stream = tokenizer.stream()
    stops = StopTexts(config.stop)
    ids: list[int] = []
    ends: list[int] = []  # characters that are complete behind each id
    at_eot = False
    for token in _next_ids(model, prompt, limit, config, number):
        at_eot = token == tokenizer.eot
        if at_eot:
            break
        piece = stream.push(token)
        ids.append(token)
        ends.append((ends[-1] if ends else 0) + len(piece))
        on_text(number, stops.push(piece))
        if stops.found:
            break
    on_text(number, stops.push(stream.end()))
    on_text(number, stops.end())
    if stops.found:
        ids = ids[: _ids_of(len(stops.text), ends)]
    return Sample(stops.text, ids, "stop" if at_eot or stops.found else "length")


def _ids_of(length: int, ends: list[int]) -> int:
    """How many ids the first `length` characters take, given the characters complete behind each id."""
    if length == 0:
        return 0
    # Not the last such id: those behind it may be the first bytes of a character that the stop text begins with.
    return ends.index(length) + 1 if length in ends else sum(end < length for end in ends)


def _next_ids(model: GPT, prompt: Sequence[int], limit: int, config: SamplingConfig, number: int) -> Iterator[int]:
    row = list(prompt)
    for _ in range(limit):
        hidden = model.hidden(torch.tensor([row], device=model.device))  # (1, T, C)
        logits = model.head(hidden[:, -1]).float()  # (1, V)
        draw = derive(config.seed, number, len(row)) / 2**64
        token = int(
            choose(logits, torch.tensor([draw], dtype=torch.float64), config.temperature, config.top_k, config.top_p)
        )
        row.append(token)
        yield token


def choose(logits: Tensor, draws: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """The next id of each row, int64 (B,), from fp32 logits (B, V) and draws in [0, 1) (B,).

    A pure function: the id at which the cumulative probability passes the draw, over the ids
    sorted by probability (ties: the smaller id first), so that top_k and top_p are prefixes.
    """
    if temperature == 0 or top_p == 0:
        return logits.argmax(dim=-1)
    # Subtracting the maximum first keeps the division finite at any temperature.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).cpu().double() / temperature
    probabilities, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)  # (B, V)
    kept = nucleus(probabilities, top_k, top_p)
    cumulative = (probabilities * kept).cumsum(dim=-1)
    threshold = draws.double().cpu().unsqueeze(1) * cumulative[:, -1:]
    place = (cumulative <= threshold).sum(dim=-1, keepdim=True)
    return order.gather(1, place.clamp(max=kept.sum(dim=-1, keepdim=True) - 1)).squeeze(1)


def nucleus(probabilities: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Which of the sorted probabilities (B, V) may be drawn, bool (B, V): at least the first.

    top_p is a share of what top_k leaves, as in transformers.
    """
    among = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k is not None:
        among[:, top_k:] = False
    drawable = probabilities * among
    before = drawable.cumsum(dim=-1) - drawable  # what the likelier ids hold together
    kept = among & (before < top_p * drawable.sum(dim=-1, keepdim=True))
    kept[:, 0] = True
    return kept


class StopTexts:
    """Passes text on up to the first stop text, which may be spread over several ids."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.text = ""  # all that has been passed on
        self.held = ""  # may be the beginning of a stop text
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop text."""
        if self.found:
            return ""
        self.held += piece
        places = [place for place in (self.held.find(stop) for stop in self.stops) if place >= 0]
        if places:
            self.found = True
            return self._pass_on(min(places), drop=True)
        possible = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        return self._pass_on(len(self.held) - possible)

    def end(self) -> str:
        """What was held back, when no text follows."""
        return "" if self.found else self._pass_on(len(self.held))

    def _pass_on(self, count: int, drop: bool = False) -> str:
        certain, self.held = self.held[:count], "" if drop else self.held[count:]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop text begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
