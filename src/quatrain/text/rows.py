"""What comes out of a source: texts with their rows, and what could not be read, by kind."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quatrain.errors import did_you_mean
from quatrain.text.tokenizers import whole_characters

CHUNK = 1 << 20  # bytes that one thread parses at once, where documents are smaller

MOST_OF_A_LIST = 200  # names, and characters of them, that a message shows

State = dict[str, Any]  # of JSON


@dataclass(frozen=True)
class Reading:
    """How sources are read: `column` is the JSON key or parquet column of the text; a text beyond a cap is bad."""

    column: str = "text"
    skip_bad: bool = False
    max_document: int = 1 << 30  # bytes
    max_line: int = 1 << 30  # bytes
    max_ratio: float = 1000  # bytes out for each byte of a compressed file


class Bad(NamedTuple):
    """What cannot be read: the row in its chunk, counted from 0, a kind to count by, and a sentence."""

    row: int
    kind: str
    sentence: str
    lost: int = 1  # documents


@dataclass
class Rows:
    """The documents of a chunk: UTF-8 texts, empty ones included, with their rows in it, counted from 0."""

    texts: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    surrogates: int = 0  # lone ones, replaced by U+FFFD

    def add(self, row: int, text: str, limit: int) -> None:
        """Take in one text, or count it as bad if it is longer than the limit."""
        _, utf8, replaced = whole_characters(text)
        self.add_utf8(row, utf8, limit)
        self.surrogates += replaced

    def add_utf8(self, row: int, utf8: bytes, limit: int) -> None:
        """Take in one text that is known to be UTF-8."""
        if len(utf8) > limit:
            self.spoil_too_long(row, len(utf8))
            return
        self.texts.append(utf8)
        self.rows.append(row)

    def add_all_utf8(self, texts: list[bytes], limit: int) -> None:
        """Take in the texts of all rows, in order."""
        if max(map(len, texts), default=0) <= limit:
            self.texts, self.rows = texts, list(range(len(texts)))
        else:
            for row, text in enumerate(texts):
                self.add_utf8(row, text, limit)

    def spoil(self, row: int, kind: str, sentence: str) -> None:
        """Count a row as bad."""
        self.bad.append(Bad(row, kind, sentence))

    def spoil_too_long(self, row: int, size: int) -> None:
        """Count a row as bad because its text is beyond the limit."""
        self.spoil(row, "too long", f"a document of {size:,} bytes; allow it with --max-document-bytes")


class Chunk(NamedTuple):
    """Consecutive rows of a span, not parsed yet."""

    first: int  # row of the span
    rows: int  # rows: documents, or lines with the blank ones
    size: int  # bytes, about
    parse: Callable[[], Rows]
    state: State  # for `chunks`, to go on behind this chunk


def no_string(column: str, kind: str) -> str:
    """The sentence about a value that is not text, of which the kind is given in words."""
    return f"column '{column}' holds {kind}, expected a string"


def no_column(column: str, known: list[str]) -> str:
    """The sentence about a column that is not there."""
    # Keys of JSON: any number, of any length, and with lone surrogates.
    found = whole_characters(", ".join(name[:MOST_OF_A_LIST] for name in known[:MOST_OF_A_LIST]))[0]
    shown = found if len(found) <= MOST_OF_A_LIST else found[:MOST_OF_A_LIST] + " ..."
    return (
        f"no column '{column}'{did_you_mean(column, known[:MOST_OF_A_LIST])}; found: {shown or 'none'} "
        f"(choose one with --text-column)"
    )


def kind_of(value: Any) -> str:
    """A value's type in words."""
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def decoded(rows: "Rows", number: int, data: bytes) -> str | None:
    """The text of UTF-8 without a byte-order mark, or None and one more bad row."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        sentence = "this is UTF-16; expected UTF-8 (convert it with: iconv -f UTF-16 -t UTF-8)"
        rows.spoil(number, "not UTF-8", sentence)
        return None
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        rows.spoil(number, "not UTF-8", not_utf8(error))
        return None


def not_utf8(error: UnicodeDecodeError) -> str:
    """The sentence about bytes that are no text."""
    return f"not valid UTF-8 ({error.reason} at byte {error.start})"


def parse_values(values: list[Any], how: Reading) -> Rows:
    """The texts among values of a column; bytes are what is not UTF-8."""
    rows = Rows()
    for number, value in enumerate(values):
        if isinstance(value, str):
            rows.add(number, value, how.max_document)
        elif isinstance(value, bytes):
            decoded(rows, number, value)
        else:
            rows.spoil(number, "text is no string", no_string(how.column, value))
    return rows
