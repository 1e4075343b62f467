"""A signal is a wish to stop: heard at once, granted later."""

import signal
import threading

import pytest

from quatrain.training import signals
from quatrain.training.signals import IMPATIENT, StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(signals, "time", made)
    return made


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_interrupts_nothing(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        assert stop.signal_number == number
    assert stop


@pytest.mark.parametrize("first", SIGNALS)
def test_a_ctrl_c_that_comes_later_than_the_first_signal_interrupts_at_once(
    first: signal.Signals, clock: Clock
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest() as stop:
        signal.raise_signal(first)
        clock.now += IMPATIENT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.signal_number == first
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_signals_that_come_together_are_one_wish(first: signal.Signals, second: signal.Signals, clock: Clock) -> None:
    """A launcher sends the same signal to a group and to its members."""
    with StopRequest() as stop:
        signal.raise_signal(first)
        clock.now += 0.99 * IMPATIENT
        signal.raise_signal(second)
        signal.raise_signal(second)
    assert stop.signal_number == first


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_no_signal_but_ctrl_c_interrupts_however_late_it_comes(
    first: signal.Signals, second: signal.Signals, clock: Clock
) -> None:
    with StopRequest() as stop:
        signal.raise_signal(first)
        clock.now += 100 * IMPATIENT
        signal.raise_signal(second)
    assert stop.signal_number == first


def test_the_handlers_from_before_are_put_back_whatever_happens() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_under_nohup_a_run_goes_on_when_its_terminal_closes() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_handlers_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[object] = []

    def run() -> None:
        with StopRequest() as stop:
            seen.append([signal.getsignal(number) for number in SIGNALS] == before and not stop)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]


def test_one_inside_another_hands_on_what_it_noted() -> None:
    with StopRequest() as outer, StopRequest() as middle, StopRequest() as inner:
        signal.raise_signal(signal.SIGTERM)
        assert not outer
    assert [stop.signal_number for stop in (inner, middle, outer)] == [signal.SIGTERM] * 3


def test_one_inside_another_knows_what_that_has_noted(clock: Clock) -> None:
    with StopRequest() as outer:
        signal.raise_signal(signal.SIGINT)
        with StopRequest() as inner:
            assert inner.signal_number == signal.SIGINT
            clock.now += IMPATIENT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert outer.signal_number == signal.SIGINT
