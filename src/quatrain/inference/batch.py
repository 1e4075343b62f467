"""Many samples in the making at once: each step gives every one of them its next id.

Samples may come and go at any step, which is what a server needs; nothing of a sample depends on its neighbours
but the rounding of matrix products, whose order of sums changes with the number of rows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quatrain.inference.config import SamplingConfig
from quatrain.inference.drawing import TokenLogprob, choose, logprob_of, penalised
from quatrain.inference.stops import StopTexts, ids_of
from quatrain.mixing import derive
from quatrain.text.tokenizers import Tokenizer

LONGEST_CHARACTER = 4  # bytes of UTF-8, so ids at most
OnText = Callable[[int, str], None]  # the number of the sample, and the text that has become certain


@dataclass(frozen=True)
class Sample:
    """One continuation: its text and ids without the prompt, the eot or the stop text."""

    text: str
    ids: list[int]
    finish_reason: Literal["stop", "length"]
    logprobs: list[TokenLogprob] | None = None  # of the ids, where they were asked for
    end: TokenLogprob | None = None  # of the eot that ended it, likewise


class Decoder(Protocol):
    """What a batch needs of an `Engine`."""

    config: Any
    slots: int
    lengths: list[int]

    def prefill(self, slots: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor: ...
    def read(self, slot: int, ids: Sequence[int]) -> Tensor: ...
    def decode(self, slots: Sequence[int], ids: Sequence[int]) -> Tensor: ...
    def fork(self, slot: int, to: Sequence[int]) -> None: ...
    def free(self, slot: int) -> None: ...


class Writing:
    """One sample in the making. With `scores_prompt` the log-probabilities of the prompt's ids are told as well."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        config: SamplingConfig,
        number: int,
        limit: int,
        on_text: OnText = lambda number, text: None,
        scores_prompt: bool = False,
    ) -> None:
        self.config, self.number, self.limit, self.on_text = config, number, limit, on_text
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ends: list[int] = []  # characters that are complete behind each id
        self.scores_prompt = scores_prompt
        self.prompt_logprobs: list[TokenLogprob] = []  # of all ids but the first
        self.done = limit == 0
        self.at_eot = False
        self._eot = tokenizer.eot
        self._end: TokenLogprob | None = None
        self._stream = tokenizer.stream()
        # A prompt of ids may end within a character, and a tokenizer may spell an id by what is before it.
        for token in self.prompt[-LONGEST_CHARACTER:]:
            self._stream.push(token)
        self._stops = StopTexts(config.stop)

    @property
    def row(self) -> list[int]:
        """All ids so far."""
        return self.prompt + self.ids

    @property
    def certain(self) -> int:
        """How many ids the text takes that has been told."""
        return ids_of(len(self._stops.text), self.ends)

    @property
    def draw(self) -> float:
        """The draw of the next id in [0, 1): a function of (seed, sample, position)."""
        return derive(self.config.seed, self.number, len(self.prompt) + len(self.ids)) / 2**64

    def take(self, token: int, logits: Tensor) -> None:
        """Go on by one id, which was drawn from these logits (V,); the text that is certain is told."""
        self.at_eot = token == self._eot
        logprob = None if self.config.logprobs is None else logprob_of(logits, token, self.config.logprobs)
        if self.at_eot:
            self.done, self._end = True, logprob
            return
        piece = self._stream.push(token)
        self.ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(piece))
        self._tell(self._stops.push(piece))
        self.done = self._stops.found or len(self.ids) == self.limit

    def score_prompt(self, logits: Tensor) -> None:
        """Take the logits (T, V) behind each id of the prompt."""
        count = self.config.logprobs or 0
        self.prompt_logprobs = [logprob_of(*pair, count) for pair in zip(logits, self.prompt[1:], strict=False)]

    def end(self) -> Sample:
        """The sample; what was held back of its text is told."""
        self._tell(self._stops.push(self._stream.end()))
        self._tell(self._stops.end())
        kept = self.certain if self._stops.found else len(self.ids)
        reason: Literal["stop", "length"] = "stop" if self.at_eot or self._stops.found else "length"
        logprobs = None if self.config.logprobs is None else self.logprobs[:kept]
        return Sample(self._stops.text, self.ids[:kept], reason, logprobs, None if self._stops.found else self._end)

    def _tell(self, text: str) -> None:
        self.on_text(self.number, text)


class Batch:
    """The slots of an engine, and a queue before them. Call `step` as long as `busy`."""

    def __init__(self, engine: Decoder) -> None:
        self.engine = engine
        self.queue: deque[Writing] = deque()
        self.writing: dict[int, Writing] = {}  # by slot
        self._next: dict[int, Tensor] = {}  # logits (V,) behind what a slot holds

    @property
    def busy(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.queue or self.writing)

    def add(self, writing: Writing) -> None:
        """Put a sample into the queue; it enters with the next step that has a free slot."""
        self.queue.append(writing)

    def cancel(self, writing: Writing) -> None:
        """Forget a sample, wherever it is."""
        for slot in [slot for slot, other in self.writing.items() if other is writing]:
            self._leave(slot)
        if writing in self.queue:
            self.queue.remove(writing)

    def step(self) -> list[Writing]:
        """Give every sample its next id; returns those that are done, whose slots are free again."""
        done = self._enter()
        self._draw()
        for slot in [slot for slot, writing in self.writing.items() if writing.done]:
            done.append(self._leave(slot))
        self._go_on()
        return done

    def _enter(self) -> list[Writing]:
        """Fill free slots from the queue, the lowest first: a decode step costs as much as the highest one used.

        Each prompt is read alone, so that what it gives cannot depend on others; equal ones that follow each other
        are read once.
        """
        done = []
        free = [slot for slot in range(self.engine.slots) if slot not in self.writing]
        read: tuple[list[int], int] | None = None
        while self.queue and (free or self.queue[0].done):
            writing = self.queue.popleft()
            if writing.done:
                done.append(writing)
                continue
            slot = free.pop(0)
            if read and read[0] == writing.prompt and not writing.scores_prompt:
                self.engine.fork(read[1], [slot])
                self._next[slot] = self._next[read[1]]
            else:
                self._next[slot] = self._read(slot, writing)
            read = writing.prompt, slot
            self.writing[slot] = writing
        return done

    def _leave(self, slot: int) -> Writing:
        self.engine.free(slot)
        del self._next[slot]
        return self.writing.pop(slot)

    def _draw(self) -> None:
        """One id for each slot; those with equal settings are drawn together."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for slot, writing in self.writing.items():
            config = writing.config
            alike.setdefault((config.temperature, config.top_k, config.top_p, config.min_p), []).append(slot)
        for settings, slots in alike.items():
            writings = [self.writing[slot] for slot in slots]
            logits = torch.stack(
                [
                    penalised(self._next[slot], writing.row, writing.config.repetition_penalty)
                    for slot, writing in zip(slots, writings, strict=True)
                ]
            )
            draws = torch.tensor([writing.draw for writing in writings], dtype=torch.float64)
            tokens = choose(logits, draws, *settings).tolist()
            for slot, writing, token in zip(slots, writings, tokens, strict=True):
                writing.take(token, self._next[slot])

    def _go_on(self) -> None:
        """The logits behind the ids that were drawn."""
        full = [slot for slot in self.writing if self.engine.lengths[slot] >= self.engine.config.block_size]
        for slot in full:
            self.engine.free(slot)
            self._next[slot] = self._read(slot, self.writing[slot])
        slots = sorted(self.writing.keys() - set(full))
        if slots:
            logits = self.engine.decode(slots, [self.writing[slot].ids[-1] for slot in slots])
            self._next |= dict(zip(slots, logits, strict=True))

    def _read(self, slot: int, writing: Writing) -> Tensor:
        seen = seen_end(writing.row, self.engine.config.block_size)
        if writing.scores_prompt and not writing.ids:
            logits = self.engine.read(slot, seen)
            writing.score_prompt(logits)
            return logits[-1]
        return self.engine.prefill([slot], [seen])[0]


def seen_end(row: Sequence[int], block_size: int) -> Sequence[int]:
    """The end of a row that the model sees when it slides: all, or from the half block where the rest fits.

    A function of the row's length alone, so that a sample does not depend on when it was read again.
    """
    beyond = len(row) - block_size
    half = max(1, block_size // 2)
    return row[-(-beyond // half) * half :] if beyond > 0 else row
