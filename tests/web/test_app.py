"""What comes in from outside: whoever asks for what, it is answered in one message, and the server goes on."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from quatrain.errors import UsageError
from quatrain.web import listening
from quatrain.web.guard import POLICY, Door, is_loopback
from quatrain.web.listening import address, listen
from served import Site, network, served, serving_of

MODEL = network()


def broken(request: Request) -> PlainTextResponse:
    raise ZeroDivisionError("a page's own mistake")


async def body(request: Request) -> JSONResponse:
    return JSONResponse(len(await request.body()))


PAGES = [Route("/", lambda request: PlainTextResponse("the page")), Route("/broken", broken)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with served(serving_of(MODEL), max_body=20_000, body_seconds=0.3) as running:
        yield running


def http(
    method: str = "POST",
    path: str = "/v1/completions",
    body: bytes = b'{"prompt": "x", "max_tokens": 1}',
    host: str = "localhost:%d",
    kind: str = "application/json",
    length: int | None = None,
    **headers: str,
) -> bytes:
    """A request as bytes; %d is the port."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body) if length is None else length}"]
    lines += [f"content-type: {kind}"] if kind else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body


def fields(**values: object) -> bytes:
    return http(body=json.dumps({"prompt": "x"} | values).encode())


SCRIPT = "<script>alert(1)</script>"
HOSTILE = {
    "body said to be too large": (http(body=b"", length=10**9), 413),
    "body said to be far too large": (http(body=b"", length=10**18), 413),
    "body of a size beyond numbers": (http(body=b"", length=10**30), 400),
    "body too large": (http(body=b" " * 20_001), 413),
    "body too large in chunks": (
        http(body=b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        + b"5000\r\n"
        + b" " * 0x5000
        + b"\r\n",
        413,
    ),
    "body that does not come": (http(body=b"", length=100), 408),
    "body that stops half way": (http(body=b'{"prompt": ', length=100), 408),
    "no body": (http(body=b""), 400),
    "bad JSON": (http(body=b"{'prompt': 1}"), 400),
    "deep JSON": (http(body=b"[" * 15_000), 400),
    "not an object": (http(body=b"[]"), 400),
    "not UTF-8": (http(body=b'{"prompt": "\xff\xfe"}'), 400),
    "UTF-16": (http(body='{"prompt": "x"}'.encode("utf-16")), 400),
    "gzip": (http(body=b"\x1f\x8b\x08\x00\x00", content_encoding="gzip"), 400),
    "a lone surrogate": (http(body=b'{"prompt": "\\ud800"}'), 400),
    "a lone surrogate in a name": (http(body=b'{"model": "\\udfff<b>"}'), 404),
    "NaN": (http(body=b'{"prompt": "x", "temperature": NaN}'), 400),
    "infinity": (http(body=b'{"prompt": "x", "temperature": 1e999}'), 400),
    "a negative number": (fields(max_tokens=-5), 400),
    "a huge number": (fields(max_tokens=10**300), 400),
    "a number of too many digits": (http(body=b'{"seed": ' + b"9" * 6000 + b"}"), 400),
    "a huge n": (fields(n=2**40), 400),
    "a huge temperature": (fields(temperature=1e308), 400),
    "a huge top_k of another type": (fields(top_k="9" * 400), 400),
    "another type": (fields(prompt={"x": 1}), 400),
    "true as a number": (fields(n=True), 400),
    "ids beyond the vocabulary": (fields(prompt=[99999]), 400),
    "a prompt beyond the model": (fields(prompt="x" * 5000), 400),
    "many prompts": (fields(prompt=["x"] * 500), 400),
    "an unknown field": (fields(**{SCRIPT: 1}), 400),
    "a script as the model": (fields(model=SCRIPT), 404),
    "a terminal's escape as the model": (fields(model="\x1b[2J"), 404),
    "another host": (http(host="evil.example"), 421),
    "another host at our port": (http(host="evil.example:%d"), 421),
    "our host at another port": (http(host="localhost:1"), 421),
    "no host": (http().replace(b"host: localhost:%d\r\n", b""), 400),
    "an empty host": (http(host=""), 421),
    "two hosts": (http().replace(b"host:", b"host: evil.example\r\nhost:"), 400),
    "another site's page": (http(origin="http://evil.example"), 403),
    "a page of our host at another port": (http(origin="http://localhost:1"), 403),
    "a page without origin": (http(origin="null"), 403),
    "a cross-site form": (http(sec_fetch_site="cross-site"), 403),
    "a same-site form": (http(sec_fetch_site="same-site"), 403),
    "a form's content type": (http(kind="application/x-www-form-urlencoded"), 415),
    "plain text, as a page may send anywhere": (http(kind="text/plain"), 415),
    "no content type": (http(kind=""), 415),
    "a wrong method": (http("GET", body=b""), 405),
    "another wrong method": (http("PUT"), 405),
    "delete": (http("DELETE", "/v1/models/tiny", b""), 405),
    "a preflight": (http("OPTIONS", body=b"", origin="http://evil.example"), 403),
    "a method that is none": (http("HACK"), 405),
    "a path that is none": (http("GET", "/etc/passwd", b""), 404),
    "a path upwards": (http("GET", "/static/../../../etc/passwd", b""), 404),
    "a path upwards, hidden": (http("GET", "/%2e%2e/%2e%2e/etc/passwd", b""), 404),
    "a path with a null": (http("GET", "/v1/models/%00", b""), 404),
    "a path that is not UTF-8": (http("GET", "/v1/models/%ff%fe", b""), 404),
    "a script as the path": (http("GET", "/%3Cscript%3E", b""), 404),
    "another server's address as the path": (http("GET", "http://evil.example/", b""), 404),
    "chat": (http(path="/v1/chat/completions"), 404),
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
    "another protocol": (b"SSH-2.0-OpenSSH_9.0\r\n\r\n", 400),
    "a header without end": (b"GET / HTTP/1.1\r\nhost: " + b"x" * 100_000, 400),
    "a header that is folded": (b"GET / HTTP/1.1\r\nhost: localhost:%d\r\n broken\r\nbad header\r\n\r\n", 400),
    "a negative length": (http(length=-5), 400),
    "a length that is none": (http().replace(b"content-length: 32", b"content-length: many"), 400),
    "two lengths": (http().replace(b"connection", b"content-length: 5\r\nconnection"), 400),
    "a length and chunks": (http(transfer_encoding="chunked").replace(b'{"prompt"', b'zz\r\n{"prompt"'), 400),
    "a web socket": (
        http("GET", "/", b"", upgrade="websocket").replace(b"connection: close", b"connection: upgrade, close"),
        404,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_gets_a_4xx_and_no_traceback(name: str, site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    data, expected = HOSTILE[name]
    reply = site.raw(data.replace(b"%d", b"%d" % site.port))
    head, _, content = reply.partition(b"\r\n\r\n")
    assert head.split()[1:2] == [b"%d" % expected], reply
    for secret in (b"Traceback", b'File "', b"site-packages", b"\x1b"):
        assert secret not in reply
    if b"application/json" in head:
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
        assert b"default-src 'none'" in head
        assert b"nosniff" in head  # a script that is repeated in JSON is text
    assert capfd.readouterr().err == ""
    assert site.ask(fields={"prompt": "x", "max_tokens": 1}).status == 200


def test_there_are_at_least_thirty_of_them() -> None:
    assert len(HOSTILE) > 60


def test_model_text_is_text_and_every_answer_carries_the_policy(site: Site) -> None:
    reply = site.ask(fields={"prompt": SCRIPT, "echo": True, "max_tokens": 0})
    assert reply.json["choices"][0]["text"] == SCRIPT
    for path in ("/v1/models", "/healthz", "/nothing"):
        reply = site.ask(path)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["content-security-policy"] == POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cache-control"] == "no-store"
        assert "server" not in reply.headers
        assert "access-control-allow-origin" not in reply.headers
    assert "'unsafe" not in POLICY


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST"])
def test_our_own_pages_and_programs_come_in(site: Site, host: str) -> None:
    host = f"{host}:{site.port}"
    assert site.ask(fields={"prompt": "x"}, host=host).status == 200
    own = {"origin": f"http://{host}", "sec_fetch_site": "same-origin"}
    assert site.ask(fields={"prompt": "x"}, host=host, **own).status == 200
    assert site.ask(fields={"prompt": "x"}, host=host, content_type="application/json; charset=utf-8").status == 200
    assert site.ask("/healthz", host=host, sec_fetch_site="cross-site").status == 200  # a link leads here


def test_a_connection_that_never_asks_is_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.1)
    for data in (b"", b"GET / HTTP/1.1\r\nhost: loc"):
        assert site.raw(data).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as sock:  # a drop now and then helps nobody
        try:
            while True:
                sock.sendall(b"a")
                time.sleep(0.01)
        except OSError:
            pass
    slow = site.ask(fields={"prompt": "x", "max_tokens": 900, "sliding": True, "temperature": 0})
    assert slow.status == 200  # an answer may take longer than a head


# Pages


def test_given_pages_are_under_the_same_guard(capfd: pytest.CaptureFixture[str]) -> None:
    pages = [*PAGES, Route("/api/size", body, methods=["POST"])]
    with served(serving_of(MODEL), pages, max_body=100) as site:
        assert site.ask("/").body == b"the page"
        assert site.ask("/").headers["content-security-policy"] == POLICY
        assert site.ask("/", host="evil.example").status == 421
        assert site.ask("/api/size", b" " * 100).json == 100
        assert site.ask("/api/size", b" " * 101).status == 413
        assert site.ask("/api/size", b" ", origin="http://evil.example").status == 403
        reply = site.ask("/broken")
        assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
        assert b"mistake" not in reply.body
        assert reply.headers["content-security-policy"] == POLICY
        assert capfd.readouterr().err == "error: GET '/broken' failed (ZeroDivisionError: a page's own mistake)\n"


def test_without_pages_there_is_none(site: Site) -> None:
    reply = site.ask("/")
    assert (reply.status, reply.told) == (
        404,
        "nothing is at '/'; there is /v1/completions, /v1/models and /healthz",
    )


# A token


@pytest.fixture(scope="module")
def closed() -> Iterator[Site]:
    with served(serving_of(MODEL), PAGES, token="open sesame", host="0.0.0.0", also=("gpu7",)) as running:
        yield running


def test_who_does_not_bring_the_token_stays_outside(closed: Site) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic b3Blbg=="}, {"cookie": "a=b"}):
        for path in ("/", "/v1/models", "/nothing"):
            reply = closed.ask(path, **headers)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert "sesame" not in reply.told
    assert closed.ask(fields={"prompt": "x"}).status == 401
    assert closed.ask("/?token=wrong").status == 401
    assert closed.ask("/?token=open+sesame", host="evil.example").status == 421
    assert closed.ask("/v1/models?token=open+sesame").status == 401
    assert closed.ask("/healthz").status == 200


def test_a_program_brings_the_token_in_a_header(closed: Site) -> None:
    for word in ("Bearer open sesame", "bearer open sesame"):
        assert closed.ask("/v1/models", authorization=word).status == 200
        assert closed.ask(fields={"prompt": "x"}, authorization=word).status == 200


def test_a_browser_shows_the_token_once_and_keeps_a_cookie(closed: Site) -> None:
    reply = closed.ask("/?token=open+sesame")
    assert (reply.status, reply.headers["location"]) == (303, "/")
    cookie, *flags = reply.headers["set-cookie"].split("; ")
    assert {flag.lower() for flag in flags} == {"httponly", "samesite=strict", "path=/"}
    assert "sesame" not in cookie
    assert closed.ask("/", cookie=f"other=1; {cookie}").body == b"the page"
    assert closed.ask("/", cookie=cookie[:-1]).status == 401
    assert closed.ask(fields={"prompt": "x"}, cookie=cookie, origin="http://evil.example").status == 403


def test_a_server_on_every_address_is_reached_by_any_of_them_and_by_names_that_were_given(closed: Site) -> None:
    for host in (f"10.1.2.3:{closed.port}", f"[fe80::1]:{closed.port}", f"gpu7:{closed.port}"):
        assert closed.ask("/healthz", host=host).status == 200, host
    for host in ("10.1.2.3:1", "10.1.2.3", f"other:{closed.port}", f"1.2.3.4.evil.example:{closed.port}"):
        assert closed.ask("/healthz", host=host).status == 421, host


def test_names_of_a_door() -> None:
    assert Door(port=80).names == {name + port for name in ("localhost", "127.0.0.1", "[::1]") for port in ("", ":80")}
    assert "[fd00::5]:99" in Door("fd00::5", 99).names
    assert {"gpu7:99", "tunnel:5000"} <= Door(port=99, also=("GPU7", "tunnel:5000")).names
    assert "tunnel:99" not in Door(port=99, also=("tunnel:5000",)).names
    assert {"tunnel", "tunnel:99", "proxy"} <= Door(port=99, also=("tunnel", "proxy:443")).names


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu7", False)],
)
def test_which_hosts_only_this_machine_reaches(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


# Ports


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use; give another with --port"):
            listen("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_told() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192.0.2.1, port 0 \(.*\); give another with --host"):
        listen("192.0.2.1", 0)


def test_addresses_are_those_that_a_browser_here_can_open() -> None:
    assert [address(host, 80) for host in ("0.0.0.0", "::", "::1", "gpu7")] == [
        "http://127.0.0.1:80/",
        "http://[::1]:80/",
        "http://[::1]:80/",
        "http://gpu7:80/",
    ]
