"""SIGINT and SIGTERM as a wish to stop: heard at once, granted at the end of the step."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """While entered, notes the first signal; a second one interrupts at once.

    Outside the main thread, where Python cannot handle signals, nothing is noted.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
