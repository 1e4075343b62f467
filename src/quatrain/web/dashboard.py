"""The page and the data behind it: runs, what they measured and wrote, and their stores.

`routes` is all that an app needs; it also sets the headers and decides who may ask. Everything is named by the short
names of the runs that were given: no request holds a path, so none can leave them.
"""

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, cast

import anyio
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quatrain.errors import QuatrainError, did_you_mean
from quatrain.tokens.store import SPLITS, SplitName
from quatrain.training.metrics import Row
from quatrain.web import runs as run_folders
from quatrain.web import store_data
from quatrain.web.fields import refuse_field
from quatrain.web.refusals import Refused
from quatrain.web.through import Asked, Through, parse

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {"metrics": "metrics.jsonl", "samples": "samples.jsonl"}
READERS = 4  # of `through` at once; each holds a thread while it waits
Answer = Callable[[Request], Any]


def routes(runs: list[Path]) -> list[Route]:
    """The routes of the page over these run folders, which need not be there yet."""
    dashboard = Dashboard(runs)
    failing = [Middleware(ExceptionMiddleware, handlers={QuatrainError: dashboard.failed})]
    answers: dict[str, Answer] = {
        "runs": dashboard.all_runs,
        "rows": dashboard.rows,
        "store": dashboard.store,
        "window": dashboard.window,
    }
    return [
        Route("/", page_file, methods=["GET"]),
        Route("/page/{name}", page_file, methods=["GET"]),
        *(
            Route(f"/api/{name}", _json(answer), methods=["GET"], middleware=failing)
            for name, answer in answers.items()
        ),
        Route("/api/through", dashboard.through, methods=["POST"], middleware=failing),
    ]


def _json(answer: Answer) -> Callable[[Request], Response]:
    """An endpoint, run in a thread."""
    return lambda request: JSONResponse(answer(request))


async def page_file(request: Request) -> Response:
    """A file of the folder `page`, which lies in the wheel."""
    name = request.path_params.get("name", "index.html")
    kind = TYPES.get(Path(name).suffix)
    files = {file.name: file for file in resources.files("quatrain.web").joinpath("page").iterdir()}
    if kind is None or name not in files:
        raise Refused(404, "no such file of the page")
    # Another version of quatrain may answer at the same address tomorrow.
    return Response(files[name].read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


class Dashboard:
    """What is asked of the runs."""

    def __init__(self, runs: list[Path]) -> None:
        self.runs = run_folders.named(runs)
        self._through = Through()
        self._readers = anyio.CapacityLimiter(READERS)

    def all_runs(self, request: Request) -> dict[str, Any]:
        """The runs, in the order in which they were given."""
        return {"runs": [run_folders.describe(name, run) for name, run in self.runs.items()]}

    def rows(self, request: Request) -> dict[str, Any]:
        """A run's rows behind a place in one of its files."""
        file = _one_of(request, "file", FILES)
        after = _number(request, "after")
        run = self._run(request.query_params.get("run", ""))
        return asdict(run_folders.read_rows(run / FILES[file], after, request.query_params.get("mark", "")))

    def store(self, request: Request) -> dict[str, Any]:
        """The facts of a run's store."""
        run = self._run(request.query_params.get("run", ""))
        return store_data.facts(run_folders.open_store(run), run_folders.seq_len(run))

    def window(self, request: Request) -> dict[str, Any]:
        """One window of a run's store, of the run's length."""
        split = cast(SplitName, _one_of(request, "split", SPLITS))
        number = _number(request, "number")
        run = self._run(request.query_params.get("run", ""))
        shown = store_data.window(run_folders.open_store(run), split, run_folders.seq_len(run), number)
        if shown is None:
            raise run_folders.NotHere(f"the {split} split of this store is too short for a window")
        return shown

    async def through(self, request: Request) -> Response:
        """A prompt's continuation by each checkpoint of a run, one JSON object a line, as they are written."""
        asked = parse(await request.body())
        run = self._run(asked.run)
        return StreamingResponse(self._lines(run, asked), media_type="application/x-ndjson")

    async def _lines(self, run: Path, asked: Asked) -> AsyncIterator[str]:
        left = threading.Event()
        rows = self._through(run, asked, left)
        try:
            while (row := await self._next(rows)) is not None:
                if "error" in row:
                    row["error"] = self._without_paths(row["error"])
                yield json.dumps(row) + "\n"
            yield json.dumps({"done": True}) + "\n"
        finally:
            left.set()  # a thread that still writes ends at its next token

    async def _next(self, rows: Iterator[Row]) -> Row | None:
        return await anyio.to_thread.run_sync(next, rows, None, abandon_on_cancel=True, limiter=self._readers)

    def _run(self, name: str) -> Path:
        if name not in self.runs:
            raise run_folders.NotHere(f"no run '{name[:80]}' is shown here{did_you_mean(name[:80], self.runs)}")
        return self.runs[name]

    def failed(self, request: Request, error: Exception) -> Response:
        """A run or its store cannot be used as it is: the request was right."""
        return Refused(500, self._without_paths(str(error))).response()

    def _without_paths(self, message: str) -> str:
        """A message as a reader at another machine may see it."""
        folders = {str(run): name for name, run in self.runs.items()}
        for store in map(run_folders.store_folder, self.runs.values()):
            folders |= {str(store): store.name, str(store.resolve()): store.name}
        for folder in sorted(folders, key=len, reverse=True):  # what lies in another one first
            message = message.replace(folder, folders[folder]) if "/" in folder else message
        return message


def _one_of(request: Request, key: str, allowed: Any) -> str:
    value = request.query_params.get(key, "")
    if value not in allowed:
        refuse_field(key, f"{key} is '{value[:80]}', expected one of: {', '.join(allowed)}")
    return value


def _number(request: Request, key: str) -> int:
    """A whole number that a file can have as place, or a split as window."""
    value = request.query_params.get(key, "0")
    if not (value.isascii() and value.isdigit() and len(value) <= 15):
        refuse_field(key, f"{key} is '{value[:80]}', expected a whole number from 0")
    return int(value)
