"""Enough of the Hugging Face Hub for `HF_ENDPOINT`: information, trees, files with ranges, and failures on order."""

import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?")
FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Repo:
    """One data set at one commit; `token` is asked for if it is private, `gated` refuses the files to all."""

    def __init__(self, files: dict[str, bytes], token: str = "", gated: bool = False) -> None:
        self.files, self.token, self.gated = files, token, gated
        self.etags = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
        self.commit = hashlib.sha1(repr(self.etags).encode()).hexdigest()


class Hub:
    """The server's data sets, the failures that were ordered, and what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.orders: list[tuple[str, list[int | str]]] = []
        self.rate, self.random = 0.0, random.Random(5)
        self.asked: list[str] = []
        self.bytes = 0
        self.url = ""

    def fail(self, part: str, *how: int | str) -> None:
        """Answer the next requests whose path holds `part` with a status, or send their body "cut" or "short"."""
        self.orders.append((part, list(how)))

    def failure(self, path: str) -> int | str | None:
        for part, left in self.orders:
            if left and part in path:
                return left.pop(0)
        return self.random.choice([500, 503, "cut"]) if self.random.random() < self.rate else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.posted = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.serve()

    def serve(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(f"{self.command} {path}")
        self.how = self.hub.failure(path)
        if isinstance(self.how, int):
            after = {"Retry-After": "0"} if self.how == 429 else {}
            self.answer(self.how, b"{}", after)
        elif found := API.fullmatch(path):
            self.api(*found.groups())
        elif found := FILE.fullmatch(path):
            self.file(*found.groups())
        else:
            self.answer(404, b"{}")

    def refused(self, repo: Repo | None, revision: str | None) -> bool:
        if repo is None or (repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"):
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", repo.commit):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def api(self, name: str, what: str | None, revision: str | None, folder: str | None) -> None:
        repo = self.hub.repos.get(name)
        if self.refused(repo, revision):
            return
        assert repo is not None
        if what in (None, "revision"):
            siblings = [{"rfilename": file} for file in repo.files]
            self.json({"id": name, "sha": repo.commit, "private": False, "gated": repo.gated, "siblings": siblings})
        elif what == "tree":
            self.tree(repo, f"{folder}/" if folder else "")
        else:
            wanted = json.loads(self.posted)["paths"]
            self.json([entry(file, data) for file, data in repo.files.items() if file in wanted])

    def tree(self, repo: Repo, folder: str) -> None:
        inside = [file for file in repo.files if file.startswith(folder)]
        if not inside:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        below = {file[: file.index("/", len(folder))] for file in inside if "/" in file[len(folder) :]}
        deep = "recursive=true" in self.path.lower()
        files = [file for file in inside if deep or "/" not in file[len(folder) :]]
        folders = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in sorted(below)]
        self.json([*folders, *(entry(file, repo.files[file]) for file in files)])

    def file(self, name: str, revision: str, file: str) -> None:
        repo = self.hub.repos.get(name)
        if self.refused(repo, revision):
            return
        assert repo is not None
        commit = {"X-Repo-Commit": repo.commit}
        if repo.gated:
            self.answer(403, b"{}", commit | {"X-Error-Code": "GatedRepo"})
        elif file not in repo.files:
            self.answer(404, b"{}", commit | {"X-Error-Code": "EntryNotFound"})
        else:
            self.part(repo.files[file], commit | {"ETag": f'"{repo.etags[file]}"', "Accept-Ranges": "bytes"})

    def part(self, data: bytes, known: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            self.answer(200, data, known)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        part = data[first : last + 1]
        self.answer(206, part, known | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def json(self, content: object) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        if self.how == "short":
            body = body[: len(body) // 2]
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.how == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)
        self.hub.bytes += len(body)


def entry(file: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on 127.0.0.1, at `hub.url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
