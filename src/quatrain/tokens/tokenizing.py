"""The first half of a preparation: every unit of the input is read, tokenized in threads and written into parts.

Units do not depend on each other, so any number of processes may share them, and one that was killed
goes on behind the last part that is whole. What the store becomes is decided later, from the parts.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from quatrain.text.reading import Span, chunks, spans
from quatrain.text.rows import Chunk, Rows, State
from quatrain.text.sources import Source
from quatrain.tokens.encoding import Encoder, Tokenized
from quatrain.tokens.parts import NAME, PartWriter, whole_parts

UNIT_BYTES = 64 << 20  # on disk: small sources are put together up to it
PART_BYTES = 32 << 20  # of text, after which a new part begins
AHEAD_BYTES = 32 << 20  # of text that is being worked on: bounds the memory, whatever the number of workers
AHEAD_EACH = 4  # chunks waiting for each thread

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Unit:
    """Consecutive spans that one process reads."""

    spans: tuple[Span, ...]
    sources: tuple[int, ...]  # of each span, its source's place in the list


def units_of(sources: list[Source], size: int | None = None) -> list[Unit]:
    """The input cut into units of about so many bytes, small spans together: the same for every process."""
    size = size or UNIT_BYTES
    units: list[Unit] = []
    together: list[tuple[Span, int]] = []
    left = size
    for number, source in enumerate(sources):
        for span in spans(source):
            weight = span.size or source.size
            if together and weight > left:
                units.append(_unit(together))
                together, left = [], size
            together.append((span, number))
            left -= weight
    return [*units, _unit(together)]


def _unit(together: list[tuple[Span, int]]) -> Unit:
    return Unit(tuple(span for span, _ in together), tuple(source for _, source in together))


class Step(NamedTuple):
    """One chunk of a unit's span to be tokenized, or the end of the unit (no chunk)."""

    unit: int
    span: int
    chunk: Chunk | None


Steps = Callable[[list[int]], Iterator[Step]]


@dataclass
class Tokenizing:
    """Tokenizes units into a folder of parts."""

    units: list[Unit]
    encoder: Encoder
    folder: Path
    workers: int
    progress: Callable[[int], None] = lambda size: None  # bytes of text more
    first: dict[int, tuple[int, State | None]] = field(default_factory=dict)  # where each unit goes on
    read: dict[tuple[int, int], int] = field(default_factory=dict)  # documents of a unit's span so far
    numbers: dict[int, int] = field(default_factory=dict)  # of a unit's next part

    def run(self, mine: Iterable[int], read: Steps | None = None) -> None:
        """Tokenize what the numbered units still lack, read by `steps`; raises what that raises.

        Another way to `read` gives whole units, so an incomplete one is begun anew.
        """
        wanted = [unit for unit in mine if not self._take_up(unit, anew=read is not None)]
        with contextlib.ExitStack() as files:
            writer: PartWriter | None = None
            for step, tokenized in in_order(self._tokenize, (read or self.steps)(wanted), self.workers, _weight):
                if writer is None:
                    writer = files.enter_context(self._new_part(step.unit))
                if tokenized and step.chunk:
                    self._add(writer, step, tokenized, step.chunk.state)
                if step.chunk is None or writer.text >= PART_BYTES:
                    writer.record.last = step.chunk is None
                    writer.finish()
                    files.pop_all().close()
                    writer = None

    def _take_up(self, unit: int, anew: bool) -> bool:
        """Count what is there of a unit; whether it is complete. What is not can be begun anew."""
        found = whole_parts(self.folder, unit)
        if anew and found and not found[-1].record.last:
            for part in found:
                part.path.unlink()
            found = []
        for part in found:
            self.progress(int(part.table()["bytes"].sum()))
            for span, count in part.record.read.items():
                self.read[unit, int(span)] = self.read.get((unit, int(span)), 0) + count
        self.numbers[unit] = len(found)
        if found:
            span, state = found[-1].record.resume
            self.first[unit] = (span, state)
        return bool(found) and found[-1].record.last

    def steps(self, wanted: list[int]) -> Iterator[Step]:
        """The chunks of units, from where each goes on."""
        for unit in wanted:
            first, state = self.first.get(unit, (0, None))
            for number, span in enumerate(self.units[unit].spans):
                if number >= first:
                    here = state if number == first else None
                    for chunk in chunks(span, self.encoder.reading, here):
                        yield Step(unit, number, chunk)
            yield Step(unit, 0, None)

    def _tokenize(self, step: Step) -> tuple[Step, Tokenized | None]:
        if step.chunk is None:
            return step, None
        tokenized = self.encoder(step.span, self.units[step.unit].spans[step.span], step.chunk)
        return step._replace(chunk=step.chunk._replace(parse=Rows)), tokenized  # lets go of the text

    def _new_part(self, unit: int) -> PartWriter:
        number = self.numbers[unit]
        self.numbers[unit] += 1
        return PartWriter(self.folder / NAME.format(unit=unit, number=number))

    def _add(self, writer: PartWriter, step: Step, tokenized: Tokenized, state: State) -> None:
        place = (step.unit, step.span)
        tokenized.documents["index"] += self.read.get(place, 0)
        self.read[place] = self.read.get(place, 0) + tokenized.read
        writer.add(step.span, tokenized)
        writer.record.resume = [step.span, state]
        self.progress(int(tokenized.documents["bytes"].sum()))


def _weight(step: Step) -> int:
    return step.chunk.size if step.chunk else 0


def in_order(
    function: Callable[[T], R], items: Iterable[T], workers: int, weight: Callable[[T], int] = lambda item: 0
) -> Iterator[R]:
    """`map` in threads, in order, with a bounded number and weight of items read ahead."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[Future[R], int]] = deque()
        ahead = 0
        try:
            for item in items:
                size = weight(item)
                while waiting and (len(waiting) >= workers * AHEAD_EACH or ahead + size > AHEAD_BYTES):
                    done, was = waiting.popleft()
                    ahead -= was
                    yield done.result()
                waiting.append((pool.submit(function, item), size))
                ahead += size
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()
