"""The body of a completion request: read strictly, every field by its name, and refused where it cannot be."""

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from quatrain.errors import ConfigError, DataError, did_you_mean
from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import limit_of
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

Fields = dict[str, Any]


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


def read_json(body: bytes) -> Fields:
    """The object in a body. Raises `Refused`, also for what JSON proper does not hold (NaN) and for endless nesting."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body is {shown(found)}; expected an object with the key 'prompt'")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def read_ask(fields: Fields, serving: "Serving") -> Ask:
    """What a request asks of a model. Raises `Refused` with the name of the first field that is wrong."""
    _check_names(fields)
    config = _sampling(fields, serving)
    echo = _get(fields, "echo", _flag, False)
    prompts = _prompts(fields.get("prompt"), serving, echo)
    if len(prompts) * config.n > serving.limits.samples:
        _refuse("n", f"{len(prompts)} prompts of {config.n} samples pass {serving.limits.samples} (--samples)")
    for prompt in prompts:
        _check_length(len(prompt.ids), config, echo, serving)
    options = _get(fields, "stream_options", _object, {})
    return Ask(
        prompts,
        config,
        echo,
        _get(fields, "stream", _flag, False),
        _get(options, "include_usage", _flag, False),
    )


def _check_names(fields: Fields) -> None:
    known = [*FIELDS, "prompt", "model", *UNSUPPORTED, *ABSENT]
    for name, value in fields.items():
        if name not in known:
            _refuse(name, f"no field {shown(name)}{did_you_mean(name[:64], known)}")
        if name in UNSUPPORTED and value is not None:
            _refuse(name, f"'{name}' is not supported: {UNSUPPORTED[name]}")
        if name in ABSENT and value is not None and (isinstance(value, bool) or value != 0):
            _refuse(name, f"'{name}' is not supported, only 0; there is repetition_penalty")


def _sampling(fields: Fields, serving: "Serving") -> SamplingConfig:
    top_k = _get(fields, "top_k", _int, None)
    try:
        return SamplingConfig(
            max_tokens=_get(fields, "max_tokens", _int, 16),
            n=_get(fields, "n", _int, 1),
            temperature=_get(fields, "temperature", _number, 1.0),
            top_k=top_k if top_k is None else min(top_k, serving.vocab_size),
            top_p=_get(fields, "top_p", _number, 1.0),
            stop=_get(fields, "stop", _stops, ()),
            seed=_get(fields, "seed", _int, secrets.randbelow(2**53)),
            min_p=_get(fields, "min_p", _number, 0.0),
            repetition_penalty=_get(fields, "repetition_penalty", _penalty, 1.0),
            logprobs=_get(fields, "logprobs", _count, None),
            sliding=_get(fields, "sliding", _flag, False),
        )
    except ConfigError as error:
        raise Refused(400, str(error), param=error.mistakes[0].split()[0]) from error


def _check_length(ids: int, config: SamplingConfig, echo: bool, serving: "Serving") -> None:
    block_size, most = serving.block_size, max(serving.limits.tokens, serving.block_size)
    if ids + config.max_tokens > most:
        _refuse("max_tokens", f"{ids:,} ids and {config.max_tokens:,} more pass {most:,} (--max-tokens)")
    room = limit_of(ids, block_size, config)
    if room < 0:
        _refuse(
            "prompt", f"the prompt has {ids:,} ids, the model sees at most {block_size:,}; shorten it, or 'sliding'"
        )
    if ids > block_size and echo and config.logprobs is not None:
        _refuse("echo", f"the logprobs of {ids:,} ids cannot be told: the model sees at most {block_size:,}")
    if config.max_tokens and not room:
        # An answer without an id would be read as one with it: lm-eval takes the last id for the model's own.
        _refuse(
            "prompt", f"the prompt has {ids:,} ids, all that the model sees; max_tokens must be 0, or 'sliding' true"
        )


def _prompts(value: Any, serving: "Serving", echo: bool) -> list[Prompt]:
    """A text, texts, ids, or rows of ids; nothing is the beginning of a document."""
    if value is None or isinstance(value, str):
        return [_of_text(value or "", serving, echo)]
    if not isinstance(value, list) or not value:
        _refuse("prompt", f"prompt is {shown(value)}; expected a text, texts, a list of ids or lists of ids, not empty")
    if all(isinstance(one, str) for one in value):
        rows = value
    else:
        rows = value if all(isinstance(one, list) for one in value) else [value]
    if len(rows) > serving.limits.samples:
        _refuse("prompt", f"{len(rows):,} prompts pass {serving.limits.samples} (--samples)")
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
    wrong = [one for one in ids if not _is_int(one) or not 0 <= one < serving.tokenizer.vocab_size]
    if wrong or not ids:
        found = shown(wrong[0]) if wrong else "an empty list"
        _refuse("prompt", f"prompt holds {found}; expected ids from 0 to {serving.tokenizer.vocab_size - 1:,}")
    return Prompt(ids, *_spread(ids, serving)) if echo else Prompt(ids)


def _spread(ids: list[int], serving: "Serving") -> tuple[str, list[int]]:
    """The text of ids as far as its characters are whole, and where each id's begins."""
    stream, text, starts = serving.tokenizer.stream(), "", []
    for token in ids:
        starts.append(len(text))
        text += stream.push(token)
    return text, starts


def _get(fields: Fields, name: str, read: Callable[[str, Any], Any], default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else read(name, value)


def _refuse(param: str, message: str) -> NoReturn:
    raise Refused(400, message, param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int(name: str, value: Any) -> int:
    if not _is_int(value):
        _refuse(name, f"{name} is {shown(value)}, expected a whole number")
    if abs(value) >= 2**63:
        _refuse(name, f"{name} is beyond 64 bits")
    found: int = value
    return found


def _number(name: str, value: Any) -> float:
    if not _is_int(value) and not isinstance(value, float):
        _refuse(name, f"{name} is {shown(value)}, expected a number")
    if abs(value) > 1e300 or not math.isfinite(value):
        _refuse(name, f"{name} is too large")
    return float(value)


def _penalty(name: str, value: Any) -> float:
    number = _number(name, value)
    if not 0.01 <= number <= 100:
        _refuse(name, f"{name} is {number}, it must be in 0.01 .. 100 (1 is off)")
    return number


def _count(name: str, value: Any) -> int:
    count = _int(name, value)
    if not 0 <= count <= MOST_LOGPROBS:
        _refuse(name, f"{name} is {count}, it must be in 0 .. {MOST_LOGPROBS}")
    return count


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, f"{name} is {shown(value)}, expected true or false")
    return value


def _object(name: str, value: Any) -> Fields:
    if not isinstance(value, dict):
        _refuse(name, f"{name} is {shown(value)}, expected an object")
    unknown = sorted(value.keys() - {"include_usage"})
    if unknown:
        _refuse(name, f"{name} has no field {shown(unknown[0])}; there is include_usage")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        _refuse(name, f"{name} is {shown(value)}, expected a text or a list of texts")
    if len(texts) > MOST_STOPS:
        _refuse(name, f"{len(texts)} stop texts; at most {MOST_STOPS}")
    if any(len(text) > LONGEST_STOP for text in texts):
        _refuse(name, f"a stop text has more than {LONGEST_STOP} characters")
    return tuple(texts)
