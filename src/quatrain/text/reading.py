"""Documents out of sources: cut into spans that can be read on their own, and spans into chunks for threads.

A chunk is cheap to cut and is parsed later, in any thread. Its state says where reading goes on behind it.
Every row comes out as a text or as something bad with its kind: none is passed over without a word.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, BinaryIO

from quatrain.errors import DataError
from quatrain.text import hub, parquet
from quatrain.text.compressed import Truncated, decompress
from quatrain.text.lines import READ, behind, count_lines, next_line, objects, parse_lines, pieces_of_lines, whole_lines
from quatrain.text.rows import Bad, Chunk, Reading, Rows, State, decoded, parse_values
from quatrain.text.sources import Source, opened

SPAN = 64 << 20  # bytes of a file that can be sought


@dataclass(frozen=True)
class Span:
    """A part of one source that can be read on its own: bytes of a .jsonl, row groups of a .parquet, or all."""

    source: Source
    start: int = 0
    stop: int = 0
    size: int = 0  # bytes of text, about; 0: not known before it is read

    @cached_property
    def first_row(self) -> int:
        """Rows of the source before this span; for .jsonl the lines before it are counted."""
        if self.start == 0:
            return 0
        if self.source.kind == ".parquet":
            found = parquet.metadata(self.source.path)
            return sum(found.row_group(number).num_rows for number in range(self.start))
        with opened(self.source.path) as file:
            return count_lines(file, self.start)

    def place(self, row: int, short: bool = False) -> str:
        """Where a row of this span, counted from 0, stands: `file.jsonl:17`; if short, by the file's base name."""
        return self.source.place(self.first_row + row + 1, short)


def spans(source: Source) -> Iterator[Span]:
    """The spans of a source, in order; of a parquet file that cannot be read one, that `chunks` fails on."""
    size = source.size
    if source.compression:
        yield Span(source)
    elif source.kind == ".jsonl":
        borders = [*range(0, size, SPAN), size] if size else [0, 0]
        yield from (Span(source, start, stop, stop - start) for start, stop in pairwise(borders))
    elif source.kind == ".parquet":
        try:
            groups = list(parquet.groups(parquet.metadata(source.path), SPAN))
        except DataError:
            groups = [(0, 0, 0)]
        yield from (Span(source, *group) for group in groups)
    else:
        yield Span(source, size=size)


def chunks(span: Span, how: Reading, state: State | None = None) -> Iterator[Chunk]:
    """The chunks of a span: all of them, or those behind a state.

    Raises `DataError` for a file that cannot be read to its end; with `skip_bad` that is one more bad row.
    """
    readers = {".txt": _text, ".jsonl": _json_lines, ".parquet": _parquet, "poems": _poems, "hub": _hub}
    state = state or {"row": 0}
    row = state["row"]
    if state.get("over"):
        return
    try:
        for chunk in readers[span.source.kind](span, how, state):
            row = chunk.first + chunk.rows
            yield chunk
    except DataError as error:
        if not how.skip_bad or span.source.address:  # a stream that breaks is no bad document
            raise
        lost = _left(span, row, how, error)
        spoiled = Rows(bad=[_bad_file(span, error)._replace(lost=lost)])
        yield Chunk(row, lost, 0, lambda: spoiled, {"row": row + lost, "over": True})


def parse(span: Span, chunk: Chunk, how: Reading) -> Rows:
    """The rows of a chunk. Raises `DataError` with the place of the first bad one, but for `skip_bad`."""
    try:
        rows = chunk.parse()
    except DataError as error:
        if not how.skip_bad:
            raise
        return Rows(bad=[_bad_file(span, error)._replace(lost=chunk.rows)])
    if rows.bad and not how.skip_bad:
        raise DataError(f"{span.place(chunk.first + rows.bad[0].row)}: {rows.bad[0].sentence}")
    return rows


def read_texts(source: Source, how: Reading | None = None) -> Iterator[bytes]:
    """Every text of a source in UTF-8, one after another. Raises `DataError`."""
    how = how or Reading()
    for span in spans(source):
        for chunk in chunks(span, how):
            yield from parse(span, chunk, how).texts


def read_objects(source: Source) -> Iterator[dict[str, Any]]:
    """Every object of a .jsonl, plain or compressed. Raises `DataError` for the first line that holds none."""
    span, how = Span(source), Reading()
    row = 0
    with opened(source.path) as file:
        for block, _ in whole_lines(_pieces(span, how, file), how.max_line):
            rows = Rows()
            yield from (found for _, found in objects(rows, block, how.max_line))
            for bad in rows.bad:
                raise DataError(f"{span.place(row + bad.row)}: {bad.sentence}")
            row += block.count(b"\n")


def _bad_file(span: Span, error: DataError) -> Bad:
    # Without the path: a store holds none.
    sentence = str(error).removeprefix(f"{span.source.path}: ")
    kinds = {Truncated: "truncated file", parquet.NoColumn: "no text"}
    return Bad(0, kinds.get(type(error), "damaged file"), sentence)


def _left(span: Span, row: int, how: Reading, error: DataError) -> int:
    """Documents of a span from a row on where reading stopped; 1 where nobody knows or there is none."""
    if isinstance(error, parquet.NoColumn):
        return max(1, error.rows)
    if span.source.kind != ".parquet" or span.source.compression:
        return 1
    path, groups = span.source.path, (span.start, span.stop)
    try:
        found = parquet.metadata(path)
        parquet.check_sizes(path, span.source.size, found, groups, how)
        return max(1, parquet.rows_of(found, *groups) - row)
    except DataError:
        return 1


def _pieces(span: Span, how: Reading, file: BinaryIO) -> Iterator[bytes]:
    raw = iter(lambda: file.read(READ), b"")
    source = span.source
    return decompress(source.path, source.compression, raw, how.max_ratio) if source.compression else raw


def _text(span: Span, how: Reading, state: State) -> Iterator[Chunk]:
    if state["row"] == 0:
        yield Chunk(0, 1, span.source.size, partial(_parse_text, span, how), {"row": 1})


def _parse_text(span: Span, how: Reading) -> Rows:
    rows, parts, size = Rows(), [], 0
    with opened(span.source.path) as file:
        for piece in _pieces(span, how, file):
            size += len(piece)
            if size <= how.max_document:  # beyond it, the length alone is wanted
                parts.append(piece)
    if size > how.max_document:
        rows.spoil_too_long(0, size)
    else:
        text = decoded(rows, 0, b"".join(parts))
        if text is not None:
            rows.add_utf8(0, text.encode(), how.max_document)
    return rows


def _poems(span: Span, how: Reading, state: State) -> Iterator[Chunk]:
    # The blocks between blank lines; the final newline of the file belongs to none of them.
    blocks = span.source.path.read_text(encoding="utf-8").strip("\n").split("\n\n")
    if state["row"] == 0:
        rows = Rows([block.encode() for block in blocks], list(range(len(blocks))))
        yield Chunk(0, len(blocks), span.source.size, lambda: rows, {"row": len(blocks)})


def _json_lines(span: Span, how: Reading, state: State) -> Iterator[Chunk]:
    row = state["row"]
    with opened(span.source.path) as file:
        if span.source.compression:
            offset = state.get("offset", 0)
            pieces = behind(_pieces(span, how, file), offset)
        else:
            offset = state.get("offset", next_line(file, span.start))
            pieces = pieces_of_lines(file, offset, span.stop)
        for block, end in whole_lines(pieces, how.max_line):
            count = block.count(b"\n") + (not block.endswith(b"\n"))
            yield Chunk(
                row, count, len(block), partial(parse_lines, block, how), {"row": row + count, "offset": offset + end}
            )
            row += count


def _parquet(span: Span, how: Reading, state: State) -> Iterator[Chunk]:
    if not span.source.compression:
        yield from parquet.chunks(span.source.path, (span.start, span.stop), how, state)
        return
    with opened(span.source.path) as file:
        yield from parquet.chunks_of_stream(_pieces(span, how, file), span.source.path, how, state)


def _hub(span: Span, how: Reading, state: State) -> Iterator[Chunk]:
    assert span.source.address
    row = state["row"]
    for values, behind_it in hub.read(span.source.address, how.column, state.get("hub")):
        size = sum(len(value) for value in values if isinstance(value, str))
        yield Chunk(
            row, len(values), size, partial(parse_values, values, how), {"row": row + len(values), "hub": behind_it}
        )
        row += len(values)
