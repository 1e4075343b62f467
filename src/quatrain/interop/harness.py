"""A model of ours under EleutherAI's lm-eval, in this process: its tasks and numbers, our forward passes."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from quatrain.errors import DataError, UsageError
from quatrain.inference.config import SamplingConfig
from quatrain.inference.endings import Question, answer
from quatrain.inference.engine import Engine
from quatrain.inference.forward import Forward
from quatrain.inference.ranks import ALONE, Ranks
from quatrain.inference.sampling import write
from quatrain.model.device import Precision
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import Tokenizer

GENERATED = 256  # ids, where a task names no limit: lm-eval's own default


def adapter(model: GPT, tokenizer: Tokenizer, precision: Precision = "fp32", ranks: Ranks = ALONE) -> Any:
    """An `lm_eval.api.model.LM`. Raises `UsageError` without the library."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError as error:
        raise UsageError("--lm-eval needs the library 'lm-eval': pip install 'quatrain[eval]'") from error

    forward = Forward(model, precision)

    @cache
    def engine() -> Engine:
        return Engine(model, dtype=precision)

    class Adapter(TemplateLM):  # type: ignore[misc]  # the library has no types
        """Ids and texts by our tokenizer; the prefix of an empty context is eot, as for its hf backend."""

        tokenizer_name = tokenizer.name

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eot

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            ids: list[int] = tokenizer.encode(string).tolist()
            return ids

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            return likelihoods([(tuple(context), tuple(ending)) for _, context, ending in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                windows = get_rolling_token_windows(
                    self.tok_encode(request.args[0]), tokenizer.eot, model.config.block_size, 1
                )
                pairs = [make_disjoint_window(window) for window in windows]
                scored = likelihoods([(tuple(context), tuple(ending)) for context, ending in pairs])
                found.append(sum(logprob for logprob, _ in scored))
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [continued(*request.args) for request in requests]

    def likelihoods(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, bool]]:
        """Endings behind the same context are one question, so that it is computed once."""
        places: dict[tuple[int, ...], list[int]] = {}
        for number, (context, ending) in enumerate(pairs):
            if len(ending) > model.config.block_size:
                raise DataError(f"a continuation has {len(ending)} ids, above block_size {model.config.block_size}")
            places.setdefault(context, []).append(number)
        questions = [Question(context, tuple(pairs[n][1] for n in numbers)) for context, numbers in places.items()]
        answers = answer(forward, questions, ranks=ranks) or []
        found = [(0.0, True)] * len(pairs)
        for numbers, one in zip(places.values(), answers, strict=True):
            for number, logprob, greedy in zip(numbers, one.logprobs, one.greedy, strict=True):
                found[number] = (logprob, greedy)
        return found

    def continued(context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until", [])
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        most = min(int(settings.get("max_gen_toks", GENERATED)), model.config.block_size - 1)
        ids = tokenizer.encode(context).tolist()[-(model.config.block_size - most) :] or [tokenizer.eot]
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
        config = SamplingConfig(max_tokens=most, temperature=temperature, stop=stops)
        return write(engine(), tokenizer, ids, config)[0].text

    return Adapter()


def run_tasks(
    model: GPT,
    tokenizer: Tokenizer,
    names: Sequence[str],
    items: int | None = None,
    precision: Precision = "fp32",
    task_manager: Any = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """The scores of tasks of lm-eval, by `lm_eval:NAME`. Raises `UsageError` for a task that it does not know."""
    ours = adapter(model, tokenizer, precision, ranks)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = task_manager or TaskManager()
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UsageError(f"lm-eval {lm_eval.__version__} has no task '{unknown[0]}'; `lm-eval ls tasks` lists them")
    done = lm_eval.simple_evaluate(
        model=ours, tasks=list(names), limit=items, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    return {f"lm_eval:{name}": _facts(name, done, model, lm_eval.__version__) for name in names}


def _facts(name: str, done: dict[str, Any], model: GPT, version: str) -> dict[str, Any]:
    results = done["results"][name]
    counts = done.get("n-samples", {}).get(name, {})
    hashes = [sample["doc_hash"] for sample in done.get("samples", {}).get(name, [])]
    known = {
        "count": counts.get("effective"),
        "context_length": model.config.block_size,
        "data_hash": _hash_of(hashes),
    }
    scores = {}
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        error = results.get(f"{metric}_stderr,{kind}")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            scores[metric] = {
                "value": float(value),
                "standard_error": error if isinstance(error, float) else None,
                "method": f"lm-eval {version}, task {name} version {done.get('versions', {}).get(name)}, {metric}",
                **known,
            }
    return {"task": name, **known, "scores": scores}


def _hash_of(documents: Sequence[str]) -> str | None:
    import hashlib

    return hashlib.sha256("\n".join(documents).encode()).hexdigest() if documents else None
