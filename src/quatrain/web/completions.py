"""The completions API: requests are read in `asking`, written in `serving`, and answered here in OpenAI's shape."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from quatrain.web.asking import read_ask
from quatrain.web.fields import read_json
from quatrain.web.refusals import Refused, shown

if TYPE_CHECKING:
    from quatrain.web.serving import Order, Piece, Serving, Token

T = TypeVar("T")
NOBODY = (
    "no model speaks beside a training, which train --serve shows; use quatrain serve RUN, when it has a checkpoint"
)
GRACE = 5.0  # seconds beyond a request's own time in which its client may read what was written


async def list_models(request: Request) -> Response:
    """The model that is served, if there is one."""
    serving = request.app.state.serving
    return JSONResponse({"object": "list", "data": [serving.facts] if serving else []})


async def one_model(request: Request) -> Response:
    """The same by its name."""
    serving, name = request.app.state.serving, request.path_params["name"]
    check_model(serving, name)
    return JSONResponse(serving.facts)


async def complete(request: Request) -> Response:
    """Continue prompts."""
    serving: Serving | None = request.app.state.serving
    if serving is None:
        raise Refused(404, NOBODY, code="model_not_found")
    body = await request.body()
    fields = await run_in_threadpool(read_json, body)
    check_model(serving, fields.get("model"))
    ask = await run_in_threadpool(read_ask, fields, serving)
    order = serving.submit(ask)
    answer = Answer(serving, order)
    if ask.stream:
        return Events(answer)
    try:
        return JSONResponse(await unless_gone(answer.whole(), request.receive, serving.limits.seconds + GRACE))
    finally:
        order.cancel()


def check_model(serving: "Serving | None", name: object) -> None:
    """Raise `Refused` for a model that is not served; None: whichever is."""
    if name is None or (serving is not None and name == serving.name):
        return
    there = f"this server has {serving.name!r}" if serving else NOBODY
    raise Refused(404, f"no model {shown(name)}; {there}", param="model", code="model_not_found")


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive, seconds: float) -> T:
    """The result of work, which ends when the client leaves (`ClientDisconnect`) and after so many seconds."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer:
    """What is sent back for an order."""

    def __init__(self, serving: "Serving", order: "Order") -> None:
        self.serving, self.order = serving, order
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.name,
            "seed": order.ask.config.seed,
        }
        self.until = asyncio.get_running_loop().time() + serving.limits.seconds
        self.completion_tokens = 0

    async def pieces(self) -> "AsyncIterator[Piece]":
        """The order's pieces; raises `Refused` where they take too long."""
        pieces = self.order.pieces()
        try:
            while True:
                async with asyncio.timeout_at(self.until):
                    piece = await anext(pieces)
                self.completion_tokens += piece.count
                yield piece
        except StopAsyncIteration:
            return
        except TimeoutError:
            seconds = self.serving.limits.seconds
            raise Refused(504, f"not done after {seconds:g} seconds (--timeout); ask for fewer tokens") from None

    async def whole(self) -> dict[str, Any]:
        """One object with all choices."""
        pieces = [piece async for piece in self.pieces()]
        choices = [self._choice(piece) for piece in sorted(pieces, key=lambda piece: piece.index)]
        return self.head | {"choices": choices, "usage": self.usage}

    async def events(self) -> AsyncIterator[str]:
        """The same as the data of events, a choice's piece in each."""
        asked = self.order.ask.usage
        async for piece in self.pieces():
            yield _compact(self.head | {"choices": [self._choice(piece)]} | ({"usage": None} if asked else {}))
        if asked:
            yield _compact(self.head | {"choices": [], "usage": self.usage})

    @property
    def usage(self) -> dict[str, int]:
        """Ids of the prompts, each once, and of all choices."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.order.ask.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
        }

    def _choice(self, piece: "Piece") -> dict[str, Any]:
        asked = self.order.ask.config.logprobs is not None
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": _logprobs(piece.tokens, self.serving) if asked else None,
            "finish_reason": piece.finish_reason,
        }


def _logprobs(tokens: "list[Token]", serving: "Serving") -> dict[str, Any]:
    """OpenAI's object, which names ids by their texts; `token_ids` and `top` keep apart what is spelled alike."""
    spell = serving.spell
    named: list[dict[str, float] | None] = []
    for token in tokens:
        texts: dict[str, float] = {}
        if token.logprob is not None:
            for other, logprob in (*token.top, (token.id, token.logprob)):
                texts.setdefault(spell(other), logprob)
        named.append(texts or None)
    return {
        "tokens": [spell(token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": named,
        "text_offset": [token.start for token in tokens],
        "token_ids": [token.id for token in tokens],
        "top": [[{"id": id, "text": spell(id), "logprob": logprob} for id, logprob in token.top] for token in tokens],
    }


class Events(Response):
    """An answer as server-sent events, which ends with its client."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._tell(send), receive, self.answer.serving.limits.seconds + GRACE)
        except ClientDisconnect:
            pass  # or does not read: the connection is cut
        finally:
            self.answer.order.cancel()

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self.answer.events():
                await _send(send, data)
            await _send(send, "[DONE]")
        except Refused as error:
            await _send(send, _compact(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _compact(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
