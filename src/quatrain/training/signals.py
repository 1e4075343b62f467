"""SIGINT, SIGTERM and SIGHUP as a wish to stop: heard at once, granted at the end of the step."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
NOHUP = getattr(signal, "SIGHUP", None)  # where the caller ignores it, it stays ignored
IMPATIENT = 1.0  # seconds: a launcher sends the same signal to a group and to its members within less


class StopRequest:
    """While entered, notes the first signal; another Ctrl-C a second or more later interrupts at once.

    One inside another knows what that has noted, and hands on what it notes itself. Outside the main thread, where
    Python cannot handle signals, nothing is noted.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._noted_at = 0.0
        self._before: dict[int, signal._HANDLER] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if number != NOHUP or signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
            for outer in self._outer():
                self.signal_number, self._noted_at = outer.signal_number, outer._noted_at
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for outer in self._outer():
            outer.signal_number, outer._noted_at = self.signal_number, self._noted_at

    def _outer(self) -> "list[StopRequest]":
        """The request that this one stands in, if any."""
        owners = {getattr(handler, "__self__", None) for handler in self._before.values()}
        return [owner for owner in owners if isinstance(owner, StopRequest)]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is None:
            self.signal_number = number
            self._noted_at = time.monotonic()
            if number == signal.SIGINT:
                # Not print: the handler may have interrupted one.
                os.write(2, b"\nfinishing this step, then saving; Ctrl-C again ends at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._noted_at >= IMPATIENT:
            raise KeyboardInterrupt
