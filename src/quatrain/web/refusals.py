"""What a request is refused with: a status, and one message in the shape of OpenAI's errors."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quatrain.text.visible import visible

SHOWN = 200  # characters of what a client sent that an error repeats
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    421: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class Refused(Exception):
    """A request that is not answered. `param` is the field that is wrong; `code` a word that programs know."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, object]:
        """The error as OpenAI's clients read it."""
        kind = KINDS.get(self.status, "invalid_request_error")
        # A lone surrogate of the request would not be UTF-8, and a client may print what it is told.
        message = visible(self.message, keep="\n")
        param = None if self.param is None else visible(self.param[:SHOWN])
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.body, self.status, self.headers)


def shown(value: object) -> str:
    """A client's value as an error repeats it: not whole where it is long."""
    text = repr(value) if isinstance(value, str | int | float | bool | type(None)) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"


def refuse(request: Request, error: Exception) -> Response:
    """The answer to a request that was refused, by us or by the router."""
    if isinstance(error, Refused):
        return error.response()
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    allowed = (error.headers or {}).get("Allow", "another method")
    found = {
        404: f"nothing is at {path}; there is /v1/completions, /v1/models and /healthz",
        405: f"{path} does not take {shown(request.method)}; it takes {allowed}",
    }
    headers = dict(error.headers or {})
    return Refused(error.status_code, found.get(error.status_code, error.detail), headers=headers).response()
