"""A signal is a wish to stop: heard at once, granted later."""

import signal
import threading

import pytest

from quatrain.training.signals import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_interrupts_nothing(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        assert stop.signal_number == number
    assert stop


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_interrupts_at_once(first: signal.Signals, second: signal.Signals) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest() as stop:
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert stop.signal_number == first
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_handlers_from_before_are_put_back_whatever_happens() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


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
