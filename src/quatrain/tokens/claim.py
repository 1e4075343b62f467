"""The folder of a store that is being written: whose it is, and that one process alone writes it."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from quatrain.errors import DataError, QuatrainError, UsageError
from quatrain.files import replace_file, writing
from quatrain.tokens.store import VERSION, TokenStore

PROGRESS = "prepare.json"
PARTS = "parts"
LOCK = "prepare.lock"
DESCRIPTIONS = ("tokenizer.json", PROGRESS, "store.json")
TASK = "task_{0:05d}_of_{1:05d}"
OTHER_TASK_STARTS = 10.0  # seconds at most that another task takes to claim the folder


class Unfinished(DataError):
    """The store cannot be made yet; what is there counts."""


class Claim:
    """A context in which `folder` is ours to prepare the store of a plan, a hash of all that decides its ids.

    Entering raises `DataError`, and touches nothing, unless the folder is absent, empty, or holds our own
    unfinished store of the same plan that no other process is writing; with a `task` (number, of), other tasks
    may write beside it. What a `UsageError` inside leaves is taken back, but for `Unfinished`: the input must change,
    and with it the plan, so nothing could be continued.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        plan: str,
        task: tuple[int, int] | None = None,
        command: str = "prepare",
        pinned: dict[str, str] | None = None,  # revisions of streams by name: the same command goes on with them
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.task = task
        self.command = command
        self.pinned = pinned or {}
        self.shards = re.compile(rf"{re.escape(name)}_(train|val)(_(\d{{6,}}|eot)\.bin|\.idx)(\.tmp)?")
        self.made_folder = not folder.exists()
        self.locks = contextlib.ExitStack()

    @property
    def parts(self) -> Path:
        """The folder of what is tokenized already."""
        return self.folder / PARTS

    def finished(self, request: Callable[[], str]) -> bool:
        """Whether the folder holds exactly the store of a request; raises `DataError` if it holds another one."""
        if not (self.folder / "store.json").exists():
            return False
        if TokenStore(self.folder).facts.get("request") == request():
            self.clear_progress()
            with contextlib.suppress(OSError):  # of a process that was killed, or is about to remove it
                (self.folder / LOCK).unlink()
            return True
        raise DataError(
            f"{self.folder}: holds a finished store of other sources or options; choose another --out or remove it"
        )

    def __enter__(self) -> "Claim":
        self._check_ours()
        with writing(self.folder):
            self.parts.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks, contextlib.ExitStack() as shared:
            if self.task:
                self._lock(locks, self.parts / (TASK.format(*self.task) + ".lock"))
                self._lock(shared, self.folder / LOCK, OTHER_TASK_STARTS)
                for path in sorted(self.parts.glob("task_*.lock")):
                    if path.stem[-5:] != f"{self.task[1]:05d}":  # shares of other sizes overlap with ours
                        self._lock(shared, path)
            else:
                self._lock(locks, self.folder / LOCK)
                for path in sorted(self.parts.glob("task_*.lock")):
                    self._lock(locks, path)
            progress = {"version": VERSION, "plan": self.plan, "command": self.command, "pinned": self.pinned}
            replace_file(self.folder / PROGRESS, json.dumps(progress).encode())
            self.locks = locks.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        kept = self.task or (isinstance(error, Unfinished) and not self.made_folder)
        take_back = isinstance(error, UsageError) and not kept
        if take_back:
            self._take_back()
        if not self.task:
            (self.folder / LOCK).unlink(missing_ok=True)
        self.locks.close()
        if take_back and self.made_folder:
            with contextlib.suppress(OSError):  # somebody else has put a file into it
                self.folder.rmdir()

    def _lock(self, locks: contextlib.ExitStack, path: Path, seconds: float = 0) -> None:
        with writing(path):
            try:
                locks.enter_context(FileLock(path, timeout=seconds))
            except Timeout as error:
                raise DataError(
                    f"{self.folder}: another {self.command} is writing into it; wait for it, or stop it"
                ) from error
            except NotImplementedError as error:
                raise QuatrainError(
                    f"{path}: this file system has no locks; choose another place for --out, or have it mounted with "
                    f"them (flock)"
                ) from error

    def remove_shards(self) -> None:
        """Remove shards and indices of an earlier try, whole or not."""
        for path in self.folder.iterdir():
            if self.shards.fullmatch(path.name):
                path.unlink()

    def clear_progress(self) -> None:
        """Remove what only an unfinished store needs."""
        shutil.rmtree(self.parts, ignore_errors=True)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _take_back(self) -> None:
        self.remove_shards()
        shutil.rmtree(self.parts, ignore_errors=True)
        for name in DESCRIPTIONS:
            for ending in ("", ".tmp"):
                (self.folder / (name + ending)).unlink(missing_ok=True)

    def _check_ours(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"{self.folder}: a file; --out must be a folder that is absent, empty or our own")
        present = sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
        claiming = {PROGRESS + ".tmp", LOCK}
        if set(present) <= claiming or (set(present) <= claiming | {PARTS} and self._only_locks()):
            return  # empty, or killed while it was claimed
        ours = {name + ending for name in DESCRIPTIONS for ending in ("", ".tmp")} | {LOCK, PARTS}
        foreign = [name for name in present if name not in ours and not self.shards.fullmatch(name)]
        plan = self._plan_of_unfinished()
        if foreign or plan is None:
            path = self.folder / (foreign or present)[0]
            raise DataError(
                f"{path}: --out must be absent, empty or our own; this file is not ours, nothing was touched"
            )
        if plan != self.plan:
            raise DataError(
                f"{self.folder}: holds an unfinished store of other sources or options (or its sources have changed "
                f"since); choose another --out, or remove that folder"
            )

    def _only_locks(self) -> bool:
        return self.parts.is_dir() and all(path.suffix == ".lock" for path in self.parts.iterdir())

    def _plan_of_unfinished(self) -> str | None:
        try:
            plan: str = json.loads((self.folder / PROGRESS).read_bytes())["plan"]
            return plan
        except (OSError, ValueError, KeyError, TypeError):
            return None


def pinned_before(folder: Path) -> dict[str, str]:
    """The revisions of streams, by name, that the store in a folder is made of, finished or not."""
    try:
        facts = json.loads((folder / "store.json").read_bytes())
        return {source["name"]: source["revision"] for source in facts["sources"] if "revision" in source}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return dict(json.loads((folder / PROGRESS).read_bytes())["pinned"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
