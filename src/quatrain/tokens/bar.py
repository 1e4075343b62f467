"""The bar of a preparation on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column

from quatrain.console import human
from quatrain.tokens.progress import amount


class Amount(ProgressColumn):
    """What is done of a phase, and how fast."""

    def render(self, task: Task) -> str:
        return amount(task.description, int(task.completed), int(task.total or 0), task.speed or 0.0)


def bar() -> Progress:
    """A line as wide as the terminal, that is gone when it ends; the bar takes what the words leave."""
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        Amount(Column(no_wrap=True)),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=human(), highlight=False), transient=True, expand=True)
