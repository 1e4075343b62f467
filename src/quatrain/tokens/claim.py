"""The folder of a store that is being written: whose it is, and that one process alone writes it."""

import contextlib
import json
import re
from pathlib import Path

from filelock import FileLock, Timeout

from quatrain.errors import DataError, UsageError
from quatrain.files import replace_file, writing
from quatrain.tokens.store import VERSION, TokenStore

PROGRESS = "prepare.json"
LOCK = "prepare.lock"
DESCRIPTIONS = ("tokenizer.json", PROGRESS, "store.json")


class Claim:
    """A context in which `folder` is ours to write the store of a request, a hash of what decides its ids.

    Entering raises `DataError`, and touches nothing, unless the folder is absent, empty, or holds our own
    unfinished store of the same request that no other process is writing. What a `UsageError` inside
    leaves is taken back: the input must change, and with it the request, so nothing could be continued.
    """

    def __init__(self, folder: Path, name: str, request: str, command: str = "prepare") -> None:
        self.folder = folder
        self.request = request
        self.command = command
        self.shards = re.compile(rf"{re.escape(name)}_(train|val)(_(\d{{6,}}|eot)\.bin|\.idx)(\.tmp)?")
        self.lock = FileLock(folder / LOCK, timeout=0)
        self.made_folder = not folder.exists()

    def finished(self) -> bool:
        """Whether the folder holds exactly this store; raises `DataError` if it holds another one."""
        if not (self.folder / "store.json").exists():
            return False
        if TokenStore(self.folder).facts.get("request") == self.request:
            return True
        raise DataError(
            f"{self.folder}: holds a finished store of other sources or options; choose another --out or remove it"
        )

    def __enter__(self) -> "Claim":
        self._check_ours()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire()
        except Timeout as error:
            raise DataError(
                f"{self.folder}: another {self.command} is writing into it; wait for it, or stop it"
            ) from error
        progress = {"version": VERSION, "request": self.request, "command": self.command}
        replace_file(self.folder / PROGRESS, json.dumps(progress).encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UsageError):
            self._take_back()
        (self.folder / LOCK).unlink(missing_ok=True)
        self.lock.release()
        if isinstance(error, UsageError) and self.made_folder:
            with contextlib.suppress(OSError):  # somebody else has put a file into it
                self.folder.rmdir()

    def remove_shards(self) -> None:
        """Remove shards and indices of an earlier try or pass, whole or not."""
        for path in self.folder.iterdir():
            if self.shards.fullmatch(path.name):
                path.unlink()

    def _take_back(self) -> None:
        self.remove_shards()
        for name in DESCRIPTIONS:
            for ending in ("", ".tmp"):
                (self.folder / (name + ending)).unlink(missing_ok=True)

    def _check_ours(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"{self.folder}: a file; --out must be a folder that is absent, empty or our own")
        present = sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
        if set(present) <= {PROGRESS + ".tmp", LOCK}:
            return  # empty, or killed while it was claimed
        ours = {name + ending for name in DESCRIPTIONS for ending in ("", ".tmp")} | {LOCK}
        foreign = [name for name in present if name not in ours and not self.shards.fullmatch(name)]
        request = self._request_of_unfinished()
        if foreign or request is None:
            path = self.folder / (foreign or present)[0]
            raise DataError(
                f"{path}: --out must be absent, empty or our own; this file is not ours, nothing was touched"
            )
        if request != self.request:
            raise DataError(
                f"{self.folder}: holds an unfinished store of other sources or options; choose another --out, "
                f"or remove that folder"
            )

    def _request_of_unfinished(self) -> str | None:
        try:
            request: str = json.loads((self.folder / PROGRESS).read_bytes())["request"]
            return request
        except (OSError, ValueError, KeyError, TypeError):
            return None
