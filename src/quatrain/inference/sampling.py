"""From a prompt to texts.

Every draw is a function of (seed, sample, position), so a sample does not depend on how many are drawn beside it,
and no generator has a state. (The logits do depend on it by rounding: about 1e-6 in fp32. A draw that falls that
close to a border between two ids may go either way.) The model sees the prompt's ids alone; an empty prompt is one
eot.
"""

from itertools import islice

from quatrain.errors import DataError
from quatrain.inference.batch import Batch, Decoder, OnText, Sample, Writing
from quatrain.inference.config import SamplingConfig
from quatrain.inference.engine import Engine
from quatrain.inference.products import Dtype
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import Tokenizer

SLOTS = 16  # samples of one prompt that are decoded together

__all__ = ["Sample", "generate", "write"]


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str = "",
    config: SamplingConfig | None = None,
    dtype: Dtype = "fp32",
    on_text: OnText = lambda number, text: None,
) -> list[Sample]:
    """Samples of a prompt's continuation, each ending at eot, a stop text, max_tokens or block_size.

    `on_text` is called with every piece of text as soon as it is certain, one sample behind the other. The model is
    left as it is. Raises `DataError` for a prompt longer than block_size, unless `sliding`.
    """
    config = config or SamplingConfig()
    ids = prompt_ids(tokenizer, prompt, model.config.block_size, config)
    return write(Engine(model, min(config.n, SLOTS), dtype), tokenizer, ids, config, on_text)


def write(
    engine: Decoder,
    tokenizer: Tokenizer,
    prompt: list[int],
    config: SamplingConfig,
    on_text: OnText = lambda number, text: None,
) -> list[Sample]:
    """The same from ids, by an engine whose slots are free."""
    limit = limit_of(len(prompt), engine.config.block_size, config)
    batch, told = Batch(engine), _InOrder(on_text)
    writings = (Writing(tokenizer, prompt, config, number, limit, told.hear) for number in range(config.n))
    samples: dict[int, Sample] = {}
    while len(samples) < config.n:
        for writing in islice(writings, engine.slots - len(batch.queue)):  # no more than can begin
            batch.add(writing)
        for writing in batch.step():
            samples[writing.number] = writing.end()
            told.end(writing.number)
    return [samples[number] for number in range(config.n)]


def prompt_ids(tokenizer: Tokenizer, prompt: str, block_size: int, config: SamplingConfig) -> list[int]:
    """The ids of a prompt, or one eot; raises `DataError` where the model cannot see them all and may not slide."""
    ids: list[int] = tokenizer.encode(prompt).tolist() or [tokenizer.eot]
    if len(ids) > block_size and not config.sliding:
        raise DataError(f"the prompt has {len(ids):,} ids, the model sees at most {block_size:,}; shorten it")
    return ids


def limit_of(prompt: int, block_size: int, config: SamplingConfig) -> int:
    """The most ids that may follow a prompt of so many."""
    return config.max_tokens if config.sliding else min(config.max_tokens, block_size - prompt)


class _InOrder:
    """Samples grow beside each other, but are told one behind the other: those that are not on are held back."""

    def __init__(self, on_text: OnText) -> None:
        self.on_text = on_text
        self.now = 0
        self.held: dict[int, list[str]] = {}
        self.ended: set[int] = set()

    def hear(self, number: int, text: str) -> None:
        """A piece of a sample."""
        if number == self.now:
            self.on_text(number, text)
        else:
            self.held.setdefault(number, []).append(text)

    def end(self, number: int) -> None:
        """No piece of this sample follows."""
        self.ended.add(number)
        while self.now in self.ended:
            self.now += 1
            for text in self.held.pop(self.now, []):
                self.on_text(self.now, text)
