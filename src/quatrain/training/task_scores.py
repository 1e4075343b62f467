"""Tasks that a training scores at each of its validations, on the uncompiled model."""

from collections.abc import Callable

import numpy as np

from quatrain.inference.tasks import Given, check_fit, evaluate_task, named_tasks
from quatrain.model.device import Precision
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import Tokenizer
from quatrain.training.metrics import Row


class TaskScores:
    """The tasks of `train.eval_tasks`, read once."""

    def __init__(self, words: str, items: int, tokenizer: Tokenizer, block_size: int) -> None:
        """Raises `UsageError` or `DataError` for a task that is not there, or has a question that cannot be asked."""
        self.given: list[Given] = named_tasks(words, count=items or None)
        for given in self.given:
            check_fit(given, tokenizer, block_size)

    def score(
        self, model: GPT, tokenizer: Tokenizer, precision: Precision, should_stop: Callable[[], bool]
    ) -> Row | None:
        """The values of every task's scores by name, with count and data hash; None if told to stop."""
        found: Row = {}
        for given in self.given:
            result = evaluate_task(model, tokenizer, given, precision, should_stop=should_stop)
            if result is None:
                return None
            values = {name: score["value"] for name, score in result["scores"].items() if np.isfinite(score["value"])}
            known = ("count", "context_length", "data_hash")
            found[given.task.name] = values | {key: result[key] for key in known}
        return found
