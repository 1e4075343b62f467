"""A server for tests: an application on a free port of this machine, in a thread of this process."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from quatrain.inference.engine import Engine
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import ByteTokenizer

pytest.importorskip("starlette", reason="no optional library: starlette")
pytest.importorskip("uvicorn", reason="no optional library: uvicorn")

from quatrain.web.app import create_app
from quatrain.web.asking import Limits
from quatrain.web.guard import Door
from quatrain.web.listening import Server, listen
from quatrain.web.serving import Serving

BYTES = ByteTokenizer()


def network(**switches: Any) -> GPT:
    """A random model of bytes that sees 96 of them; its texts differ, and its likeliest byte is never eot."""
    config = ModelConfig(**({"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 96, "vocab_size": 257} | switches))
    model = GPT(config, torch.Generator().manual_seed(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
        model.head_weight[256] = 0
    return model.eval()


def serving_of(model: GPT | None = None, slots: int = 8, limits: Limits | None = None, restart: int | None = None):
    return Serving(Engine(model or network(), slots, restart=restart), BYTES, "tiny", limits)


class Reply(NamedTuple):
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def told(self) -> str:
        """The message of an error, which has OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error["message"]


class Site:
    """A running server."""

    def __init__(self, port: int, serving: Serving | None) -> None:
        self.port, self.serving = port, serving
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self, path: str = "/v1/completions", fields: Any = None, method: str | None = None, **headers: str
    ) -> Reply:
        """One request; `fields` are sent as JSON, bytes as they are."""
        body = fields if isinstance(fields, bytes | None) else json.dumps(fields).encode()
        sent = {"content-type": "application/json"} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
            reply = connection.getresponse()
            return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())

    def raw(self, data: bytes, end: bool = False) -> bytes:
        """What comes back for bytes as they are."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as sock:
            sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(65536):
                    found += part
            return found


@contextlib.contextmanager
def served(serving: Serving | None = None, routes: Sequence[Any] = (), **door: Any) -> Iterator[Site]:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        app = create_app(serving.start() if serving else None, routes, Door(**{"port": port, **door}))
        server = Server(app, sock, serving.close if serving else lambda: None)
        server.beside()
        try:
            yield Site(port, serving)
        finally:
            server.end()
