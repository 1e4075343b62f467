"""The application: the completions API, whatever pages are given, and the guard before both."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from quatrain.text.visible import visible
from quatrain.web.completions import complete, list_models, one_model
from quatrain.web.guard import HEADERS, Door, Guard
from quatrain.web.refusals import Refused, refuse, shown

if TYPE_CHECKING:
    from quatrain.web.serving import Serving


def create_app(serving: "Serving | None", routes: Sequence[BaseRoute] = (), door: Door | None = None) -> Starlette:
    """The API of a model (None: there is none yet, and completions say so), and pages under the same guard.

    Endpoints find the model as `request.app.state.serving`.
    """
    app = Starlette(
        routes=[
            Route("/healthz", health),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/completions", complete, methods=["POST"]),
            *routes,
        ],
        middleware=[Middleware(Guard, door or Door())],
        exception_handlers={Refused: refuse, HTTPException: refuse, ClientDisconnect: left, Exception: failed},
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    return app


async def health(request: Request) -> Response:
    """Whether the server can do its work."""
    serving: Serving | None = request.app.state.serving
    if serving is not None and serving.dead:
        raise Refused(503, "the engine has failed; the server ends")
    return JSONResponse({"status": "ok", "model": serving.name if serving else None})


async def left(request: Request, error: Exception) -> Response:
    """The client has gone: nobody reads this."""
    return Response(status_code=499)


async def failed(request: Request, error: Exception) -> Response:
    """A mistake of ours: the client learns that it is not its own, the terminal which one it is."""
    what = f"{request.method} {shown(request.url.path)} failed ({type(error).__name__}: {error})"
    print(f"error: {visible(what)}", file=sys.stderr, flush=True)
    message = "the server failed at this request; it has said more on its terminal"
    return Refused(500, message, headers=HEADERS | {"cache-control": "no-store"}).response()  # the guard is further in
