"""What a person sees of a preparation: a bar with rate and time left on a terminal, plain lines elsewhere."""

import time
from typing import TYPE_CHECKING

from quatrain.console import human, say

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 5.0
UNITS = {"tokenizing": "MB of text", "tasks on Ray": "tasks"}  # of other phases: documents


class Bars:
    """Shows the phases of a preparation, one after the other; a context that ends the bar."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.phase = ""
        self.began = self.last_line = time.monotonic()
        self.first = 0

    def __enter__(self) -> "Bars":
        if human().isatty():
            from quatrain.tokens.bar import bar  # with rich, only for this

            self.bar = bar()
            self.bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, line: str) -> None:
        """A sentence about the preparation."""
        if self.bar:
            self.bar.console.print(line, markup=False, soft_wrap=True)
        else:
            say(line)

    def __call__(self, phase: str, done: int, of: int) -> None:
        """So much of a phase is done."""
        if phase != self.phase:
            self.phase, self.began, self.first = phase, time.monotonic(), done
            if self.bar:
                for old in self.bar.task_ids:
                    self.bar.remove_task(old)
                self.bar.add_task(phase, total=of or None, completed=done)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, total=max(of, done) if of else None)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            rate = (done - self.first) / max(1e-9, self.last_line - self.began)
            left = f", {(of - done) / rate:,.0f} s left" if of > done and rate else ""
            self.say(f"{phase}: {amount(phase, done, of, rate)}{left}")


def amount(phase: str, done: int, of: int, rate: float) -> str:
    """`12.3 of 110.0 MB of text, 95.1/s`, or the same in documents."""
    unit = UNITS.get(phase, "documents")
    if unit == "MB of text":
        whole = f" of {of / 1e6:,.1f}" if of else ""
        return f"{done / 1e6:,.1f}{whole} {unit}, {rate / 1e6:,.1f} MB/s"
    return f"{done:,} of {of:,} {unit}, {rate:,.1f}/s"
