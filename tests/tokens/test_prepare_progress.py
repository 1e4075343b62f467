"""What a person sees of a preparation: plain lines now and then, and on a terminal one bar for each phase."""

import io
import sys

import pytest

from quatrain.tokens import progress
from quatrain.tokens.progress import Bars, amount


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a test sets it."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("done", "of", "expected"),
    [
        (12_340_000, 110_000_000, "12.3 of 110.0 MB of text, 95.1 MB/s"),
        (12_340_000, 0, "12.3 MB of text, 95.1 MB/s"),
        (0, 1_234_567_890, "0.0 of 1,234.6 MB of text, 95.1 MB/s"),
    ],
)
def test_tokenizing_is_counted_in_bytes_of_text(done, of, expected):
    assert amount("tokenizing", done, of, 95_130_000) == expected


def test_other_phases_are_counted_in_documents():
    assert amount("writing train", 1234, 5678, 4321.0).startswith("1,234 of 5,678 documents, 4,321")


def test_without_a_terminal_a_line_says_now_and_then_how_far_it_is(clock, capsys):
    with Bars() as bars:
        for second in range(13):
            clock[0] = float(second)
            bars("tokenizing", second * 10_000_000, 200_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "tokenizing: 60.0 of 200.0 MB of text, 10.0 MB/s, 14 s left",
        "tokenizing: 120.0 of 200.0 MB of text, 10.0 MB/s, 8 s left",
    ]


def test_the_rate_of_a_phase_counts_from_where_it_began(clock, capsys):
    with Bars() as bars:
        bars("tokenizing", 90_000_000, 100_000_000)  # done by an earlier run
        clock[0] = 6.0
        bars("tokenizing", 96_000_000, 100_000_000)
        clock[0] = 20.0
        bars("writing train", 0, 100)
        clock[0] = 26.0
        bars("writing train", 60, 100)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "tokenizing: 96.0 of 100.0 MB of text, 1.0 MB/s, 4 s left"
    assert told[-1].startswith("writing train: 60 of 100 documents, 10")
    assert told[-1].endswith("/s, 4 s left")


def test_what_has_no_known_end_has_no_time_left(clock, capsys):
    with Bars() as bars:
        bars("tokenizing", 0, 0)
        clock[0] = 8.0
        bars("tokenizing", 16_000_000, 0)
    assert capsys.readouterr().out.splitlines() == ["tokenizing: 16.0 MB of text, 2.0 MB/s"]


def test_a_sentence_is_said_at_once(capsys):
    with Bars() as bars:
        bars.say("passed over [x].md")
    assert capsys.readouterr().out == "passed over [x].md\n"


def test_on_a_terminal_one_bar_shows_the_phase_at_a_time(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Bars() as bars:
        assert bars.bar
        bars("tokenizing", 5_000_000, 20_000_000)
        bars("tokenizing", 25_000_000, 20_000_000)  # files were larger than they seemed
        bars.bar.refresh()
        bars.say("no markup: [bold]x[/bold]")
        bars("writing val", 1, 3)
        bars.bar.refresh()
        assert len(bars.bar.tasks) == 1
    shown = terminal.getvalue()
    assert "25.0 of 25.0 MB of text" in shown
    assert "1 of 3 documents" in shown
    assert "no markup: [bold]x[/bold]" in shown
