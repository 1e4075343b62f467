"""Published tasks and any other of multiple choice: rows to questions, questions to scores that say how they came.

Every score carries its method (text, tokens, normaliser), count, standard error, context length and data hash.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError, UsageError, did_you_mean
from quatrain.inference import items
from quatrain.inference.endings import (
    NOTHING_KEPT,
    PAIRS_AT_ONCE,
    Answer,
    Kept,
    Question,
    answer,
    ids_at_once,
    truncated,
)
from quatrain.inference.forward import Forward
from quatrain.inference.items import Item, Row, Way, question_of
from quatrain.inference.ranks import ALONE, Ranks
from quatrain.inference.tally import mean_and_error
from quatrain.inference.task_data import Published, read_file, read_published, rows_hash
from quatrain.model.device import Precision
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import Tokenizer

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """What a task asks: the fields of its rows, and the ways in which it is published."""

    name: str
    fields: tuple[str, ...]
    ways: tuple[Way, ...]
    published: Published | None = None


@dataclass(frozen=True)
class TaskScore:
    """One number and all that it depends on."""

    value: float
    standard_error: float | None
    count: int
    method: str
    context_length: int
    data_hash: str


TASKS = {
    task.name: task
    for task in (
        Task(
            "hellaswag",
            ("activity_label", "ctx_a", "ctx_b", "ctx", "endings", "label"),
            (
                Way("raw", "ctx + ' ' + ending, tokenized apart", items.hellaswag_raw, False, ("sum", "mean")),
                Way(
                    "lm_eval",
                    "activity_label: ctx_a Ctx_b without brackets, tokenized with the ending",
                    items.hellaswag_cleaned,
                    True,
                    ("acc", "acc_norm"),
                ),
            ),
            Published(
                "Rowan/hellaswag",
                "218ec52e09a7e7462a5400043bb9a69a41d06b76",
                "data/validation-*.parquet",
                (
                    (
                        "data/validation-00000-of-00001.parquet",
                        "899813071e1e95efafec90f856e1987d2150fa4d020fc005df6962c259f660cd",
                    ),
                ),
            ),
        ),
        Task(
            "lambada",
            ("text",),
            (Way("lm_eval", "last word after the words before it", items.lambada, True, ("greedy", "perplexity")),),
            Published(
                "EleutherAI/lambada_openai",
                "900124bf3b8235c6daf21033af9948b3f07346c4",
                "data/lambada_test.jsonl",
                (("data/lambada_test.jsonl", "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"),),
            ),
        ),
        Task(
            "blimp",
            ("sentence_good", "sentence_bad"),
            (Way("lm_eval", "eot + ' ' + sentence", items.blimp, True, ("acc", "by_group")),),
            Published("nyu-mll/blimp", "877fba0801ffb7cbd8c39c1ff314a46f053f6036", "*/train-*.parquet"),
        ),
    )
}
OWN_FIELDS = ("context", "endings", "label", "delimiter", "group")
OWN_WAY = Way(
    "own", "context + delimiter + ending, tokenized together", items.own, True, ("acc", "mean", "acc_norm", "by_group")
)


class Given(NamedTuple):
    """A task with its rows."""

    task: Task
    rows: list[Row]
    data_hash: str


def named_tasks(words: str, file: Path | None = None, count: int | None = None) -> list[Given]:
    """The tasks that words with commas between them name. Raises `UsageError` for two of one name, too."""
    # The name of a file that is there may hold a comma.
    each = [words] if Path(words).is_file() else [word.strip() for word in words.split(",") if word.strip()]
    found: dict[str, Given] = {}
    for word in each:
        given = named_task(word, file, count)
        if given.task.name in found:
            raise UsageError(
                f"two tasks are called '{given.task.name}', which their scores go by; ask for one at a time"
            )
        found[given.task.name] = given
    return list(found.values())


def named_task(word: str, file: Path | None = None, count: int | None = None) -> Given:
    """The task that a word names, `NAME`, `NAME=FILE` or `FILE`; of the first `count` rows if given.

    A named task without a file is fetched from the Hub, once. Raises `UsageError` and `DataError`.
    """
    name, equals, path = word.partition("=")
    if name in TASKS and (equals or file is None or word == name):
        task, place = TASKS[name], Path(path) if equals else file
    elif Path(word).exists() and file is None:
        task, place = Task(Path(word).name, OWN_FIELDS, (OWN_WAY,)), Path(word)
    else:
        raise UsageError(f"no task '{word}'{did_you_mean(name, TASKS)}; there is {', '.join(TASKS)}, or a .jsonl file")
    if place is None:
        assert task.published is not None
        rows = read_published(task.published)
    else:
        rows = read_file([place])
    rows = rows[:count] if count else rows
    for number, row in enumerate(rows, start=1):
        try:
            for way in task.ways:
                way.item(row)
        except DataError as error:
            raise DataError(f"{place or word}: question {number}: {error}") from error
    return Given(task, rows, rows_hash(rows, task.fields))


def evaluate_task(
    model: GPT,
    tokenizer: Tokenizer,
    given: Given,
    precision: Precision = "fp32",
    memory: "Callable[[str], Kept]" = lambda key: NOTHING_KEPT,
    done: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> dict[str, Any] | None:
    """Every score of a task by name, and what it was measured on; None if told to stop.

    `memory` keeps the answers of a way's batches under a key that names all they depend on, but the model.
    """
    forward = Forward(model, precision)
    scores: dict[str, TaskScore] = {}
    cut = 0
    for way in given.task.ways:
        asked = [way.item(row) for row in given.rows]
        questions = list(_encoded(given, way, asked, tokenizer, model.config.block_size))
        cut = max(cut, sum(truncated(question, model.config.block_size) for question in questions))
        key = _key(given, way, tokenizer, precision, ranks, ids_at_once(forward.device))
        answers = answer(forward, questions, memory(key), done, should_stop, ranks)
        if answers is None:
            return None
        names = [name for name in way.scores if name != "by_group"]
        outcomes = [[OUTCOMES[name](*each) for name in names] for each in zip(asked, questions, answers, strict=True)]
        table = np.array(outcomes, dtype=np.float64)  # (questions, scores)
        for column, name in enumerate(names):
            said = f"{way.said}; {SAID[name]}"
            scores[f"{way.name}_{name}"] = _scored(name, table[:, column], said, model, given.data_hash)
        if "by_group" in way.scores:
            scores |= _by_group(way, [item.group for item in asked], table[:, 0], model, given.data_hash)
    return {
        "task": given.task.name,
        "count": len(given.rows),
        "truncated": cut,
        "context_length": model.config.block_size,
        "precision": precision,
        "data_hash": given.data_hash,
        "scores": {name: asdict(score) for name, score in scores.items()},
    }


def endings_of(given: Given, world_size: int = 1) -> int:
    """How many endings one rank scores, about: the total of `done`."""
    return sum(len(way.item(row).choices) for way in given.task.ways for row in given.rows) // world_size


def check_fit(given: Given, tokenizer: Tokenizer, block_size: int) -> None:
    """Raises `DataError` for the first question that the tokenizer cannot spell or the model cannot hold."""
    for way in given.task.ways:
        for _ in _encoded(given, way, [way.item(row) for row in given.rows], tokenizer, block_size):
            pass


def _encoded(
    given: Given, way: Way, asked: Sequence[Item], tokenizer: Tokenizer, block_size: int
) -> Iterator[Question]:
    for number, item in enumerate(asked, start=1):
        where = f"task {given.task.name}, question {number}"
        try:
            question = question_of(item, tokenizer, way.joined)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        longest = max(map(len, question.endings))
        if longest > block_size:
            raise DataError(
                f"{where}: an ending has {longest} ids, and the model sees at most block_size {block_size} of them"
            )
        yield question


def _key(given: Given, way: Way, tokenizer: Tokenizer, precision: Precision, ranks: Ranks, ids: int) -> str:
    facts = [given.task.name, way.name, given.data_hash, tokenizer.sha256, precision, *ranks, PAIRS_AT_ONCE, ids]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def predicted(item: Item, question: Question, found: Answer, normaliser: str) -> int:
    """The place of the likeliest ending, the first of equals. An empty one has no mean: it is never chosen by one."""
    sizes = {
        "sum": [1] * len(item.choices),
        "mean": [len(ending) for ending in question.endings],
        "acc_norm": [len(choice) for choice in item.choices],
    }[normaliser]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.array(found.logprobs) / np.array(sizes, dtype=np.float64)
    return int(np.argmax(np.where(np.isnan(scaled), -np.inf, scaled)))


def _right(normaliser: str) -> Callable[[Item, Question, Answer], float]:
    return lambda item, question, found: float(predicted(item, question, found, normaliser) == item.label)


OUTCOMES: dict[str, Callable[[Item, Question, Answer], float]] = {
    "sum": _right("sum"),
    "acc": _right("sum"),
    "mean": _right("mean"),
    "acc_norm": _right("acc_norm"),
    "greedy": lambda item, question, found: float(found.greedy[item.label]),
    "perplexity": lambda item, question, found: -found.logprobs[item.label],
}
SAID = {
    "sum": "share right by the sum of log-probabilities",
    "acc": "share right by the sum of log-probabilities",
    "mean": "share right by the mean log-probability of a token",
    "acc_norm": "share right by the log-probability divided by the characters of the ending",
    "greedy": "share of words that greedy decoding gives",
    "perplexity": "e to the mean nats of a word",
}


def _scored(name: str, outcomes: Floats, said: str, model: GPT, data_hash: str) -> TaskScore:
    value, error = mean_and_error(outcomes)
    if name == "perplexity":
        value = float(np.exp(min(value, 700.0)))
        error = None if error is None else value * error  # to first order
    return TaskScore(value, error, len(outcomes), said, model.config.block_size, data_hash)


def _by_group(way: Way, groups: list[str], outcomes: Floats, model: GPT, data_hash: str) -> dict[str, TaskScore]:
    found = {}
    for group in sorted(set(groups) - {""}):
        among = outcomes[[name == group for name in groups]]
        said = f"{way.said}; {SAID['acc']}, of the group {group} alone"
        found[f"{way.name}_acc_{group}"] = _scored("acc", among, said, model, data_hash)
    return found
