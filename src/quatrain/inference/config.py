"""How text is sampled from a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from quatrain.settings import Settings, option


@dataclass(frozen=True)
class SamplingConfig(Settings):
    """Settings of `sample` and `generate`."""

    max_tokens: int = option(256, "the most ids to add to the prompt", "tokens")
    n: int = option(1, "samples of the prompt")
    temperature: float = option(1.0, "divides the logits; 0 takes the likeliest id each time")
    top_k: int | None = option(None, "draw from the k likeliest ids only")
    top_p: float = option(1.0, "draw from the likeliest ids that together hold this probability (Holtzman et al. 2020)")
    stop: tuple[str, ...] = option((), "texts at which a sample ends; they are left out of it")
    seed: int = option(42, "seed of the draws; sample i of a seed is the same whatever n is")
    min_p: float = option(0.0, "draw from ids at least this share as likely as the likeliest (Nguyen et al. 2024)")
    repetition_penalty: float = option(1.0, "makes ids that were there before less likely (Keskar et al. 2019); 1: off")
    logprobs: int | None = option(None, "tell the log-probability of each id, and those of so many likeliest")
    sliding: bool = option(False, "go on past block_size: the model sees the last half to whole block")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that cannot be sampled with."""
        yield from self.seed_in_range()
        yield from self.at_least(0, ["max_tokens"])
        yield from self.at_least(1, ["n"])
        yield from self.at_least(0, ["temperature"])
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k is {self.top_k}, it must be at least 1 (leave it out to draw from all ids)"
        if not 0 <= self.top_p <= 1:
            yield f"top_p is {self.top_p}, it must be in 0 .. 1"
        if not 0 <= self.min_p <= 1:
            yield f"min_p is {self.min_p}, it must be in 0 .. 1"
        if not self.repetition_penalty > 0:
            yield f"repetition_penalty is {self.repetition_penalty}, it must be above 0 (1 is off)"
        if self.logprobs is not None and self.logprobs < 0:
            yield f"logprobs is {self.logprobs}, it must be at least 0"
        if "" in self.stop:
            yield "stop holds an empty text, which would end every sample at once"
