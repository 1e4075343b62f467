"""What every request passes first: whose it is, from which page it comes, how large and how slow it may be."""

import asyncio
import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quatrain.web.refusals import Refused, shown

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {  # of every answer
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN = ("/healthz",)  # paths that need no token


@dataclass(frozen=True)
class Door:
    """Who may come in, and with how much."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    also: tuple[str, ...] = ()  # more names (or name:port) under which the server is reached
    max_body: int = 1 << 20  # bytes
    body_seconds: float = 10.0  # until a body has arrived

    @property
    def names(self) -> set[str]:
        """What a Host header may say, in lower case."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        plain = {name if _has_port(name) else f"{name}:{self.port}" for name in (*LOOPBACK, own, *self.also)}
        # A browser names no port where it is the scheme's own, as behind a tunnel or proxy it mostly is.
        bare = {name.removesuffix(port) for name in plain for port in (":80", ":443")}
        return {name.lower() for name in plain | bare | set(self.also)}

    @property
    def any_address(self) -> bool:
        """Whether it listens on every address of the machine, whose names it cannot know."""
        return self.host in ("0.0.0.0", "::")

    @property
    def cookie(self) -> tuple[str, str]:
        """Name and value of the cookie of a browser that has shown the token."""
        # Browsers send a host's cookies to all of its ports: the name holds ours.
        digest = hmac.new((self.token or "").encode(), b"quatrain serve", hashlib.sha256).hexdigest()
        return f"quatrain_{self.port}", digest


class Guard:
    """Lets requests of the own page and of programs pass, and puts the same headers on every answer."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door, self.names = app, door, door.names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        send = _with_headers(send)
        try:
            self._check_host(headers)
            _check_origin(scope["method"], headers)
            if self._shows_token(scope):
                await self._welcome(scope, receive, send)
                return
            self._check_token(scope["path"], headers)
            self._check_body(scope["method"], headers)
        except Refused as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, _Body(receive, self.door), send)

    def _check_host(self, headers: Headers) -> None:
        """Another name means that a foreign page has its own name point here (DNS rebinding)."""
        host = headers.get("host", "").lower()
        if host in self.names or (self.door.any_address and _is_address(host, self.door.port)):
            return
        raise Refused(
            421,
            f"the Host header says {shown(host)}; expected one of {', '.join(sorted(self.names))} "
            f"(another name: --allow-host)",
        )

    def _check_token(self, path: str, headers: Headers) -> None:
        if self.door.token is None or path in OPEN:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(given.strip(), self.door.token):
            return
        name, value = self.door.cookie
        if any(_equal(cookie_parser(line).get(name, ""), value) for line in headers.getlist("cookie")):
            return
        raise Refused(
            401,
            "this server wants its token: send 'Authorization: Bearer TOKEN', or open /?token=TOKEN in a browser",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _shows_token(self, scope: Scope) -> bool:
        if self.door.token is None or scope["method"] != "GET" or scope["path"] != "/":
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return any(_equal(one, self.door.token) for one in given)

    async def _welcome(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep the token as a cookie that no script reads, and take it out of the address."""
        response = RedirectResponse("/", 303)
        name, value = self.door.cookie
        response.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        await response(scope, receive, send)

    def _check_body(self, method: str, headers: Headers) -> None:
        if method in SAFE:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"content-type is {shown(kind)}; expected application/json")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.door.max_body:
            raise _too_large(self.door.max_body)


class _Body:
    """The messages of a request, with an end to their size and to the time until the body is whole."""

    def __init__(self, receive: Receive, door: Door) -> None:
        self.receive, self.door = receive, door
        self.size, self.whole = 0, False
        self.until = asyncio.get_running_loop().time() + door.body_seconds

    async def __call__(self) -> Message:
        if self.whole:
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.until):
                message = await self.receive()
        except TimeoutError:
            raise Refused(
                408,
                f"the body was not whole after {self.door.body_seconds:g} seconds; send it faster",
                headers={"connection": "close"},
            ) from None
        self.size += len(message.get("body", b""))
        if self.size > self.door.max_body:
            raise _too_large(self.door.max_body)
        self.whole = not message.get("more_body", False)
        return message


def _too_large(limit: int) -> Refused:
    message = f"the body has more than {limit:,} bytes (--max-body); send less, or several requests"
    return Refused(413, message, headers={"connection": "close"})


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse what another site's page sends: without this every page that is open could use the server."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise Refused(403, f"the request comes from the page {shown(origin)}; only pages of this server may send any")
    site = headers.get("sec-fetch-site", "same-origin")
    if method not in SAFE and site not in ("same-origin", "none"):
        raise Refused(403, f"a browser sent this request for another page (Sec-Fetch-Site: {shown(site)})")


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(HEADERS)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return wrapped


def _equal(given: str, expected: str) -> bool:
    """Compare in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def _has_port(name: str) -> bool:
    return name.rpartition(":")[2].isdecimal() and not name.endswith("]")


def _is_address(host: str, port: int) -> bool:
    """A literal address cannot be made to point elsewhere, as a name can."""
    name = host.removesuffix(f":{port}")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return name != host or port == 80


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to this host."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
