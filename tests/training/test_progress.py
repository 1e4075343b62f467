"""What a person sees of a training: a bar on a terminal, plain lines elsewhere."""

import io
import re

import pytest

from quatrain.training import progress
from quatrain.training.progress import SECONDS_BETWEEN_LINES, BarWatcher, Silent, TerminalWatcher


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def trained(step: int) -> dict[str, object]:
    return {
        "step": step,
        "loss": 4.0 - step / 100,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_second": 12345.6,
        "mfu": 0.123 if step == 1 else None,
    }


def show(watcher: progress.Watcher, steps: int = 3) -> None:
    watcher.begin(0, 100)
    watcher.say("resuming from [bold]somewhere[/bold]")
    watcher.warn("too good to be [i]true[/i]")
    for step in range(1, steps + 1):
        watcher.trained(trained(step))
    watcher.validated({"step": steps, "val_loss": 3.25, "val_tokens": 1000})
    watcher.sampled([{"prompt": "Shall I", "text": " compare\n"}, {"prompt": "Shall I", "text": " not"}])
    watcher.end()


def test_a_silent_watcher_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(Silent())
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(TerminalWatcher())
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "resuming from [bold]somewhere[/bold]",
        "warning: too good to be [i]true[/i]",
        "step      1/100  loss 3.9900  lr 1.00e-03  norm 0.50  12,346 tokens/s  mfu 12%  left 0:00:00",
        "step      3/100  validation loss 3.2500 over 1,000 tokens",
        r"    sample: 'Shall I compare\n'",
    ]


def test_of_one_training_among_many_a_warning_is_shown_once_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watcher = BarWatcher()
    show(watcher)
    show(watcher)
    assert capsys.readouterr().out == "warning: too good to be [i]true[/i]\n"


def test_plain_lines_come_at_the_first_step_and_then_by_the_clock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    watcher = TerminalWatcher()
    watcher.begin(0, 100)
    for step in range(1, 31):
        watcher.trained(trained(step))
        now += SECONDS_BETWEEN_LINES / 8
    shown = [int(step) for step in re.findall(r"step +(\d+)/100", capsys.readouterr().out)]
    assert shown == [1, 10, 19, 28]


def test_a_terminal_gets_a_bar_with_steps_loss_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "human", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    watcher = TerminalWatcher()
    show(watcher)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert "resuming from [bold]somewhere[/bold]" in text
    assert "warning: too good to be [i]true[/i]" in text
    assert re.search(r"training .*3/100.*loss 3\.970 +12,346 tokens/s +left", text)
    assert "validation loss 3.2500 over 1,000 tokens" in text
    assert watcher.bar is None


def test_a_run_outlives_the_reader_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def gone(text: str) -> None:
        said.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(progress, "say", gone)
    show(TerminalWatcher())
    assert len(said) == 5


def test_the_end_may_come_before_the_beginning_and_twice() -> None:
    watcher = TerminalWatcher()
    watcher.end()
    watcher.begin(0, 1)
    watcher.end()
    watcher.end()
