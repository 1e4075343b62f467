"""The server itself: a socket that is ours before anything else begins, and uvicorn behind it."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quatrain.errors import UsageError

if TYPE_CHECKING:
    from starlette.applications import Starlette

HEAD_SECONDS = 10.0  # until a request's head is whole
MOST_CONNECTIONS = 512
ENDING_SECONDS = 5  # until requests under way have been told that the server ends
SLOW_HEAD = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises `UsageError` that names the port and what to do."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{option} is {port}, it must be in 0 .. 65535")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {host} is in use; give another with {option} (0: one that is free)"
            ) from error
        found = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {host}, port {port} ({found}); give another with --host or {option}"
        ) from error


def address(host: str, port: int) -> str:
    """Where a browser on this machine finds the server."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"


class Server(uvicorn.Server):
    """An application on a socket. `before_end` is called before open requests are waited for."""

    def __init__(self, app: "Starlette", sock: socket.socket, before_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Patient,
                ws="none",
                loop="asyncio",
                lifespan="off",
                # What goes wrong is told by us, in one line; uvicorn would print tracebacks.
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=ENDING_SECONDS,
            )
        )
        self._sock, self._before_end = sock, before_end
        self._thread: threading.Thread | None = None
        self.ended_by: int | None = None  # the signal that ended it

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal, which uvicorn would raise again in the end; the second Ctrl-C ends at once."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self.ended_by = sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, after everybody who waits has been told."""
        await asyncio.get_running_loop().run_in_executor(None, self._before_end)
        await super().shutdown(sockets)

    def here(self) -> None:
        """Serve in this thread until a signal, which is `ended_by`, or until it is asked to `leave`."""
        self.run(sockets=[self._sock])

    def beside(self) -> None:
        """Serve in a thread of its own, which ends with the process or by `end`."""
        self._thread = threading.Thread(target=self.run, args=([self._sock],), name="server", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Ask it to end, from any thread."""
        self.should_exit = True

    def end(self) -> None:
        """End what `beside` began."""
        self.leave()
        if self._thread:
            self._thread.join(ENDING_SECONDS)


class Patient(H11Protocol):
    """Waits for the head of a request, but not for ever: a connection that never asks would be kept open."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(SLOW_HEAD)
            self.transport.close()
