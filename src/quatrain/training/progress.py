"""What a person sees of a training: a progress bar with ETA on a terminal, plain lines elsewhere."""

import contextlib
import math
import time
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quatrain.console import human, say
from quatrain.training.metrics import Row

SECONDS_BETWEEN_LINES = 10.0


class Watcher(Protocol):
    """Is told what happens in a training, and changes nothing of it."""

    def begin(self, step: int, steps: int) -> None:
        """The loop starts at a step."""

    def say(self, text: str) -> None:
        """A sentence about the run."""

    def warn(self, text: str) -> None:
        """Something is unusual, and the run goes on."""

    def trained(self, row: Row) -> None:
        """A step was done."""

    def validated(self, row: Row) -> None:
        """A validation was done."""

    def sampled(self, rows: list[Row]) -> None:
        """Samples were drawn."""

    def end(self) -> None:
        """The loop has ended, for whatever reason."""


class Silent:
    """A watcher that shows nothing."""

    def begin(self, step: int, steps: int) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def trained(self, row: Row) -> None: ...
    def validated(self, row: Row) -> None: ...
    def sampled(self, rows: list[Row]) -> None: ...
    def end(self) -> None: ...


class TerminalWatcher:
    """Shows a training on the stream that people read, as long as somebody reads it."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.last_line = 0.0
        self.steps = self.first_step = 0
        self.began = 0.0

    def begin(self, step: int, steps: int) -> None:
        self.steps, self.first_step, self.began = steps, step, time.monotonic()
        if human().isatty():
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s  left"),
                TimeRemainingColumn(),
                console=Console(file=human(), highlight=False),
                transient=True,
            )
            self.bar.add_task("training", total=steps, completed=step, loss=float("nan"), rate=0.0)
            self.bar.start()

    def say(self, text: str) -> None:
        # A run outlives the terminal (EIO) or the `| head` (EPIPE) that it was started from.
        with contextlib.suppress(OSError):
            if self.bar is not None:
                self.bar.console.print(text, markup=False, soft_wrap=True)
            else:
                say(text)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def trained(self, row: Row) -> None:
        if self.bar is not None:
            task = self.bar.task_ids[0]
            self.bar.update(task, completed=row["step"], loss=row["loss"], rate=row["tokens_per_second"])
        elif row["step"] == 1 or time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            norm = math.inf if row["grad_norm"] is None else row["grad_norm"]
            self.say(
                f"step {row['step']:>6}/{self.steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
                f"norm {norm:.2f}  {row['tokens_per_second']:,.0f} tokens/s  "
                f"mfu {_percent(row['mfu'])}  left {self._left(row['step'])}"
            )

    def _left(self, step: int) -> str:
        """The time that the remaining steps take at the pace so far, evaluations included."""
        seconds = (time.monotonic() - self.began) / max(1, step - self.first_step) * (self.steps - step)
        return str(timedelta(seconds=round(seconds)))

    def validated(self, row: Row) -> None:
        loss, tokens = row["val_loss"], row["val_tokens"]
        self.say(f"step {row['step']:>6}/{self.steps}  validation loss {loss:.4f} over {tokens:,} tokens")
        for name, found in row.get("tasks", {}).items():
            values = "  ".join(f"{score} {value:.4f}" for score, value in found.items() if isinstance(value, float))
            self.say(f"    {name}: {values}  ({found['count']:,} questions)")

    def sampled(self, rows: list[Row]) -> None:
        for row in rows[:1]:
            self.say(f"    sample: {(row['prompt'] + row['text'])!r}")

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class BarWatcher(TerminalWatcher):
    """Shows of one training among many its bar alone, and each warning once."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[str] = set()

    def say(self, text: str) -> None:
        """Nothing: who trains them all says what came out."""

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            super().say(f"warning: {text}")


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.0%}"
