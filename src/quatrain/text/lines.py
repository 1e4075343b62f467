"""JSON lines: cut into blocks of whole lines while reading, parsed later in a thread."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from quatrain.errors import DataError
from quatrain.text.rows import CHUNK, Reading, Rows, decoded, kind_of, no_column, no_string

READ = 1 << 20  # bytes read from disk at once


def count_lines(file: BinaryIO, stop: int) -> int:
    """Lines that begin before a byte of a file."""
    count, left, last = 0, stop, b"\n"
    while left > 0 and (piece := file.read(min(READ, left))):
        count += piece.count(b"\n")
        left -= len(piece)
        last = piece[-1:]
    return count + (last != b"\n")


def pieces_of_lines(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of the lines that begin at start .. stop-1; start must be the beginning of a line."""
    file.seek(start)
    left, last = stop - start, b"\n"
    while left > 0 and (piece := file.read(min(READ, left))):
        left -= len(piece)
        last = piece[-1:]
        yield piece
    while last != b"\n" and (piece := file.readline(READ)):
        last = piece[-1:]
        yield piece


def next_line(file: BinaryIO, offset: int) -> int:
    """Where the first line begins at or after a byte of a file."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    while (piece := file.readline(READ)) and not piece.endswith(b"\n"):
        pass
    return file.tell()


def behind(pieces: Iterable[bytes], offset: int) -> Iterator[bytes]:
    """What follows after so many bytes."""
    for piece in pieces:
        if offset < len(piece):
            yield piece[offset:]
        offset = max(0, offset - len(piece))


def whole_lines(pieces: Iterable[bytes], longest: int) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, and the bytes read up to their end; of a line beyond the longest only its beginning.

    Lines end at the newline byte alone: other line separators are legal inside a JSON string. Raises the `DataError`
    of `pieces` after the lines before it.
    """
    whole: list[bytes] = []
    begun: list[bytes] = []  # of the line that is open
    size = end = line = 0  # bytes of `whole`; bytes read; length of the open line
    try:
        for piece in pieces:
            end += len(piece)
            cut = piece.rfind(b"\n") + 1
            if cut:
                whole += [*begun, piece[:cut] if line <= longest else piece[piece.index(b"\n") : cut]]
                size += sum(map(len, begun)) + len(whole[-1])
                begun, line = [], 0
            if line <= longest:
                begun.append(piece[cut:])
            line += len(piece) - cut
            if size >= CHUNK:
                yield b"".join(whole), end - line
                whole, size = [], 0
    except DataError:  # the lines before a cut or a damaged place are whole
        if whole:
            yield b"".join(whole), end - line
        raise
    if whole or line:
        yield b"".join([*whole, *begun]), end


def parse_lines(block: bytes, how: Reading) -> Rows:
    """The texts of whole lines; blank ones are no documents."""
    rows = Rows()
    for number, found in objects(rows, block, how.max_line):
        if how.column not in found:
            rows.spoil(number, "no text", no_column(how.column, list(found)))
        elif not isinstance(found[how.column], str):
            rows.spoil(number, "text is no string", no_string(how.column, kind_of(found[how.column])))
        else:
            rows.add(number, found[how.column], how.max_document)
    return rows


def objects(rows: Rows, block: bytes, longest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of whole lines with their rows; a line that holds none spoils its row, a blank one is passed."""
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n")):
        if len(line) > longest:
            rows.spoil(number, "too long", f"a line of over {longest:,} bytes; allow it with --max-line-bytes")
        elif line.strip() and (text := decoded(rows, number, line)) is not None:
            try:
                # The standard library's parser is strict: a raw control character is an error.
                found = json.loads(text)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
                rows.spoil(number, "not JSON", f"not a line of JSON ({error})")
                continue
            if isinstance(found, dict):
                yield number, found
            else:
                rows.spoil(number, "not JSON", f"expected a JSON object, found {kind_of(found)}")
