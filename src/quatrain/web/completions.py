"""Requests and answers in the style of OpenAI's completions."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quatrain.web.refusals import Refused


async def list_models(request: Request) -> Response:
    """The model that is served, if there is one."""
    serving = request.app.state.serving
    return JSONResponse({"object": "list", "data": [serving.facts] if serving else []})


async def one_model(request: Request) -> Response:
    """The same by its name."""
    serving, name = request.app.state.serving, request.path_params["name"]
    if serving is None or name != serving.name:
        raise Refused(404, f"no model {name!r}", code="model_not_found")
    return JSONResponse(serving.facts)


async def complete(request: Request) -> Response:
    """Continue prompts."""
    if request.app.state.serving is None:
        raise Refused(503, "no checkpoint is there yet to speak from; the run has just begun")
    raise Refused(501, "not yet")
