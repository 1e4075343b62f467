"""The bar of a preparation on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn

from quatrain.console import human
from quatrain.tokens.progress import amount


class Amount(ProgressColumn):
    """What is done of a phase, and how fast."""

    def render(self, task: Task) -> str:
        return amount(task.description, int(task.completed), int(task.total or 0), task.speed or 0.0)


def bar() -> Progress:
    """A bar that is gone when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), Amount(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=human(), highlight=False), transient=True)
