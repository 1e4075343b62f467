"""The body of a completion request: read strictly, every field by its name, and refused where it cannot be."""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quatrain.errors import ConfigError, DataError
from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import limit_of
from quatrain.web.fields import Fields, get, is_whole, known_only, number, refusal_of, refuse_field, whole
from quatrain.web.refusals import Refused, shown

if TYPE_CHECKING:
    from quatrain.web.serving import Serving

MOST_LOGPROBS = 20  # alternatives told of each id
MOST_STOPS = 16
LONGEST_STOP = 256  # characters: longer ones cost time at each id
UNSUPPORTED = {
    "suffix": "the model only continues; it fills no gap",
    "best_of": "ask for n samples, and choose by their logprobs",
    "logit_bias": "logits are taken as the model gives them",
}
FIELDS = (
    "max_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "echo",
    "sliding",
    "user",
)
ABSENT = ("presence_penalty", "frequency_penalty")  # OpenAI's; only their zero is taken


@dataclass(frozen=True)
class Limits:
    """How much may be asked for."""

    queue: int = 256  # samples that may wait for a slot
    samples: int = 128  # of one request: prompts times n
    tokens: int = 8192  # of a prompt and what follows it
    seconds: float = 300.0  # for one request


@dataclass(frozen=True)
class Prompt:
    """What is continued; where it is echoed also its text, and where in it the text of each id begins."""

    ids: list[int]
    text: str = ""
    starts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """What a request asks for, after all checks."""

    prompts: list[Prompt]
    config: SamplingConfig  # of each prompt; n samples of each
    echo: bool = False
    stream: bool = False
    usage: bool = False  # told at the end of a stream


def read_ask(fields: Fields, serving: "Serving") -> Ask:
    """What a request asks of a model. Raises `Refused` with the name of the first field that is wrong."""
    _check_names(fields)
    config = _sampling(fields, serving)
    echo = get(fields, "echo", _flag, False)
    prompts = _prompts(fields.get("prompt"), serving, echo)
    if len(prompts) * config.n > serving.limits.samples:
        refuse_field("n", f"{len(prompts)} prompts of {config.n} samples pass {serving.limits.samples} (--samples)")
    for prompt in prompts:
        _check_length(len(prompt.ids), config, echo, serving)
    options = get(fields, "stream_options", _object, {})
    return Ask(
        prompts,
        config,
        echo,
        get(fields, "stream", _flag, False),
        get(options, "include_usage", _flag, False),
    )


def _check_names(fields: Fields) -> None:
    known_only(fields, [*FIELDS, "prompt", "model", *UNSUPPORTED, *ABSENT])
    for name, value in fields.items():
        if name in UNSUPPORTED and value is not None:
            refuse_field(name, f"'{name}' is not supported: {UNSUPPORTED[name]}")
        if name in ABSENT and value is not None and (isinstance(value, bool) or value != 0):
            refuse_field(name, f"'{name}' is not supported, only 0; there is repetition_penalty")


def _sampling(fields: Fields, serving: "Serving") -> SamplingConfig:
    top_k = get(fields, "top_k", whole, None)
    try:
        return SamplingConfig(
            max_tokens=get(fields, "max_tokens", whole, 16),
            n=get(fields, "n", whole, 1),
            temperature=get(fields, "temperature", number, 1.0),
            top_k=top_k if top_k is None else min(top_k, serving.vocab_size),
            top_p=get(fields, "top_p", number, 1.0),
            stop=get(fields, "stop", _stops, ()),
            seed=get(fields, "seed", whole, secrets.randbelow(2**53)),
            min_p=get(fields, "min_p", number, 0.0),
            repetition_penalty=get(fields, "repetition_penalty", _penalty, 1.0),
            logprobs=get(fields, "logprobs", _count, None),
            sliding=get(fields, "sliding", _flag, False),
        )
    except ConfigError as error:
        raise refusal_of(error) from error


def _check_length(ids: int, config: SamplingConfig, echo: bool, serving: "Serving") -> None:
    block_size, most = serving.block_size, max(serving.limits.tokens, serving.block_size)
    if ids + config.max_tokens > most:
        refuse_field("max_tokens", f"{ids:,} ids and {config.max_tokens:,} more pass {most:,} (--max-tokens)")
    room = limit_of(ids, block_size, config)
    if room < 0:
        refuse_field(
            "prompt", f"the prompt has {ids:,} ids, the model sees at most {block_size:,}; shorten it, or 'sliding'"
        )
    if ids > block_size and echo and config.logprobs is not None:
        refuse_field("echo", f"the logprobs of {ids:,} ids cannot be told: the model sees at most {block_size:,}")
    if config.max_tokens and not room:
        # An answer without an id would be read as one with it: lm-eval takes the last id for the model's own.
        refuse_field(
            "prompt", f"the prompt has {ids:,} ids, all that the model sees; max_tokens must be 0, or 'sliding' true"
        )


def _prompts(value: Any, serving: "Serving", echo: bool) -> list[Prompt]:
    """A text, texts, ids, or rows of ids; nothing is the beginning of a document."""
    if value is None or isinstance(value, str):
        return [_of_text(value or "", serving, echo)]
    if not isinstance(value, list) or not value:
        refuse_field(
            "prompt", f"prompt is {shown(value)}; expected a text, texts, a list of ids or lists of ids, not empty"
        )
    if all(isinstance(one, str) for one in value):
        rows = value
    else:
        rows = value if all(isinstance(one, list) for one in value) else [value]
    if len(rows) > serving.limits.samples:
        refuse_field("prompt", f"{len(rows):,} prompts pass {serving.limits.samples} (--samples)")
    return [_of_text(row, serving, echo) if isinstance(row, str) else _of_ids(row, serving, echo) for row in rows]


def _of_text(text: str, serving: "Serving", echo: bool) -> Prompt:
    tokenizer = serving.tokenizer
    try:
        ids: list[int] = tokenizer.encode(text).tolist() or [tokenizer.eot]
    except DataError as error:
        raise Refused(400, f"prompt: {error}", param="prompt") from error
    if not echo:
        return Prompt(ids)
    return Prompt(ids, text, _spread(ids, serving)[1] if text else [0])


def _of_ids(ids: list[Any], serving: "Serving", echo: bool) -> Prompt:
    wrong = [one for one in ids if not is_whole(one) or not 0 <= one < serving.tokenizer.vocab_size]
    if wrong or not ids:
        found = shown(wrong[0]) if wrong else "an empty list"
        refuse_field("prompt", f"prompt holds {found}; expected ids from 0 to {serving.tokenizer.vocab_size - 1:,}")
    return Prompt(ids, *_spread(ids, serving)) if echo else Prompt(ids)


def _spread(ids: list[int], serving: "Serving") -> tuple[str, list[int]]:
    """The text of ids as far as its characters are whole, and where each id's begins."""
    stream, text, starts = serving.tokenizer.stream(), "", []
    for token in ids:
        starts.append(len(text))
        text += stream.push(token)
    return text, starts


def _penalty(name: str, value: Any) -> float:
    factor = number(name, value)
    if not 0.01 <= factor <= 100:
        refuse_field(name, f"{name} is {factor}, it must be in 0.01 .. 100 (1 is off)")
    return factor


def _count(name: str, value: Any) -> int:
    count = whole(name, value)
    if not 0 <= count <= MOST_LOGPROBS:
        refuse_field(name, f"{name} is {count}, it must be in 0 .. {MOST_LOGPROBS}")
    return count


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse_field(name, f"{name} is {shown(value)}, expected true or false")
    return value


def _object(name: str, value: Any) -> Fields:
    if not isinstance(value, dict):
        refuse_field(name, f"{name} is {shown(value)}, expected an object")
    unknown = sorted(value.keys() - {"include_usage"})
    if unknown:
        refuse_field(name, f"{name} has no field {shown(unknown[0])}; there is include_usage")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        refuse_field(name, f"{name} is {shown(value)}, expected a text or a list of texts")
    if len(texts) > MOST_STOPS:
        refuse_field(name, f"{len(texts)} stop texts; at most {MOST_STOPS}")
    if any(len(text) > LONGEST_STOP for text in texts):
        refuse_field(name, f"a stop text has more than {LONGEST_STOP} characters")
    return tuple(texts)
