"""The page of a run that is going on, from a thread of the process that trains."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from quatrain.errors import UsageError

PORT = 8000


def needs_libraries(command: str) -> None:
    """Raise `UsageError` where the server's libraries are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{command} needs the library '{missing[0]}': pip install 'quatrain[serve]'")


@contextlib.contextmanager
def live(run: Path, port: int) -> Iterator[str]:
    """Show a run on a port of this machine alone, as long as this is entered; gives the address.

    Raises `UsageError` for a port that is in use. Nothing of the run is touched, and no model is loaded.
    """
    needs_libraries("train --serve")
    from quatrain.web.app import create_app
    from quatrain.web.dashboard import routes
    from quatrain.web.guard import Door
    from quatrain.web.listening import Server, address, listen

    host = "127.0.0.1"
    with listen(host, port, "--serve") as sock:
        port = sock.getsockname()[1]
        server = Server(create_app(None, routes([run]), Door(host, port)), sock)
        server.beside()
        try:
            yield address(host, port)
        finally:
            server.end()
