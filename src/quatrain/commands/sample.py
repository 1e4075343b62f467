"""quatrain sample: text from a run, streamed."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, UsageError
from quatrain.inference.config import SamplingConfig

if TYPE_CHECKING:
    from quatrain.inference.batch import Sample

DEFAULTS = SamplingConfig()


def sample(
    run: Path,
    *,
    prompt: str = "",
    max_tokens: int = DEFAULTS.max_tokens,
    n: int = DEFAULTS.n,
    temperature: float = DEFAULTS.temperature,
    top_k: int | None = None,
    top_p: float = DEFAULTS.top_p,
    stop: Annotated[list[str] | None, Parameter(negative=())] = None,
    seed: int = DEFAULTS.seed,
    min_p: float = DEFAULTS.min_p,
    repetition_penalty: float = DEFAULTS.repetition_penalty,
    logprobs: int | None = None,
    sliding: Annotated[bool, Parameter(negative=())] = False,
    dtype: Literal["fp32", "bf16", "int8"] = "fp32",
    device: str = "auto",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Continue a prompt, or begin a document.

    Parameters
    ----------
    run
        A run folder (its newest whole checkpoint is taken) or one checkpoint folder.
    prompt
        Text to continue; empty: a bare eot, which begins a document.
    max_tokens
        The most ids to add; prompt and sample together never pass the model's block_size, unless sliding.
    n
        Samples to draw.
    temperature
        Divides the logits; 0 takes the likeliest id each time.
    top_k
        Draw from the k likeliest ids only.
    top_p
        Draw from the likeliest ids that together hold this probability.
    stop
        Text at which a sample ends (give it several times for several texts).
    seed
        Seed of the draws; sample i of a seed is the same whatever n is.
    min_p
        Draw from ids at least this share as likely as the likeliest.
    repetition_penalty
        Above 1: ids that were there before become less likely.
    logprobs
        With --json: the log-probability of each id, and of so many likeliest ones.
    sliding
        Go on past block_size, seeing the last half to whole block.
    dtype
        The weights' numbers: fp32, bf16 or int8 (bf16 where int8 does not run).
    device
        auto, cpu, cuda, cuda:N or mps.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    try:
        config = SamplingConfig(
            max_tokens,
            n,
            temperature,
            top_k,
            top_p,
            tuple(stop or ()),
            seed,
            min_p,
            repetition_penalty,
            logprobs,
            sliding,
        )
    except ConfigError as error:
        raise error.as_flags() from None
    if logprobs is not None and not json:
        raise UsageError(f"--logprobs {logprobs} shows in the answer as JSON alone; give --json as well")
    from quatrain.inference.engine import Engine
    from quatrain.inference.sampling import SLOTS, prompt_ids, write
    from quatrain.model.device import pick_device
    from quatrain.model.pretrained import load_folder_tokenizer, load_model
    from quatrain.training.checkpoint import find_checkpoint, restart_of

    checkpoint = find_checkpoint(run, say)
    model, tokenizer = load_model(checkpoint, pick_device(device)), load_folder_tokenizer(checkpoint)
    ids = prompt_ids(tokenizer, prompt, model.config.block_size, config)
    engine = Engine(model, min(n, SLOTS), dtype, restart_of(checkpoint, tokenizer.eot))
    if engine.dtype != dtype:
        say(f"{dtype} does not run here: {engine.dtype}")
    streamed = _Streamed(prompt)
    started = time.perf_counter()
    samples = write(engine, tokenizer, ids, config, streamed)
    seconds = time.perf_counter() - started
    streamed.end()
    tokens = sum(len(one.ids) for one in samples)
    return {
        "samples": [_as_json(one) for one in samples],
        "tokens_per_second": round(tokens / seconds, 2),
    }


def _as_json(sample: "Sample") -> dict[str, Any]:
    answer = {
        "text": sample.text,
        "ids": sample.ids,
        "finish_reason": sample.finish_reason,
        "completion_tokens": len(sample.ids),
    }
    if sample.logprobs is not None:
        answer["logprobs"] = [one._asdict() for one in sample.logprobs]
    return answer


class _Streamed:
    """Prints each sample behind its prompt as it grows, a line of dashes between two."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self.number = -1

    def __call__(self, number: int, text: str) -> None:
        if number != self.number:
            say("\n---\n" if self.number >= 0 else "", end="")
            say(self.prompt, end="")
            self.number = number
        say(text, end="")

    def end(self) -> None:
        say()
