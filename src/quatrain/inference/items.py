"""Rows of a task and how each published way makes questions of them: which text, and which tokens of it."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from quatrain.errors import DataError
from quatrain.inference.endings import Question
from quatrain.text.tokenizers import Tokenizer

Row = dict[str, Any]


class Item(NamedTuple):
    """A context and the texts that may follow it; `delimiter` joins them and belongs to no choice."""

    context: str
    choices: tuple[str, ...]
    label: int = 0
    delimiter: str = " "
    group: str = ""


class Way(NamedTuple):
    """One published text preparation."""

    name: str
    said: str
    item: Callable[[Row], Item]
    joined: bool  # context and choice are tokenized as one text, as in lm-eval; else each on its own
    scores: tuple[str, ...]


def hellaswag_raw(row: Row) -> Item:
    """`ctx` and the endings as they stand in the file (build-nanogpt)."""
    return Item(text_of(row, "ctx"), _texts_of(row, "endings"), _label_of(row))


def hellaswag_cleaned(row: Row) -> Item:
    """`activity_label: ctx_a Ctx_b`, without the brackets of WikiHow (lm-eval, task hellaswag 1.0)."""
    label, first, second = (text_of(row, name) for name in ("activity_label", "ctx_a", "ctx_b"))
    endings = tuple(cleaned(ending) for ending in _texts_of(row, "endings"))
    return Item(cleaned(f"{label}: {first} {second.capitalize()}"), endings, _label_of(row))


def cleaned(text: str) -> str:
    """The preparation of lm-eval: the order of its steps decides which spaces stay."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def lambada(row: Row) -> Item:
    """The last word, given all before it (lm-eval, task lambada_openai 1.0)."""
    context, space, word = text_of(row, "text").rpartition(" ")
    if not space:
        raise DataError("'text' is one word; expected words before the last one")
    return Item(context, (word,))


def blimp(row: Row) -> Item:
    """A grammatical sentence against its ungrammatical twin, each behind an eot and a space (lm-eval, task blimp)."""
    choices = text_of(row, "sentence_good"), text_of(row, "sentence_bad")
    return Item("", choices, 0, group=str(row.get("UID", "")))


def own(row: Row) -> Item:
    """A line of a `--task` file."""
    delimiter, group = (
        text_of(row, name) if name in row else usual for name, usual in (("delimiter", " "), ("group", ""))
    )
    return Item(text_of(row, "context"), _texts_of(row, "endings"), _label_of(row), delimiter, group)


def text_of(row: Row, name: str) -> str:
    """A field that must be a text; raises `DataError`."""
    value = row.get(name)
    if not isinstance(value, str):
        found = f"is {value!r:.60}" if name in row else f"is not among its fields ({', '.join(row) or 'none'})"
        raise DataError(f"'{name}' {found}, expected a text")
    return value


def _texts_of(row: Row, name: str) -> tuple[str, ...]:
    value = row.get(name)
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(text, str) and text for text in value):
        raise DataError(f"'{name}' is {value!r:.60}, expected a list of two or more texts, none of them empty")
    return tuple(value)


def _label_of(row: Row) -> int:
    value, count = row.get("label"), len(row["endings"])
    label = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < count:
        raise DataError(f"'label' is {value!r}, expected the place of the right ending, 0 .. {count - 1}")
    return label


def question_of(item: Item, tokenizer: Tokenizer, joined: bool) -> Question:
    """The ids of an item. An empty context is one eot, and no text can produce another."""
    context, delimiter = item.context, item.delimiter
    if joined:  # spaces at the context's end belong to the tokens that follow them
        stripped = context.rstrip()
        context, delimiter = stripped, context[len(stripped) :] + delimiter
    ids = tuple(tokenizer.encode(context).tolist())
    if joined and ids:
        endings = [tokenizer.encode(context + delimiter + choice).tolist()[len(ids) :] for choice in item.choices]
    else:
        endings = [tokenizer.encode(delimiter + choice).tolist() for choice in item.choices]
    return Question(ids or (tokenizer.eot,), tuple(tuple(ending) for ending in endings))
