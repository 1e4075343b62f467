"""A program that runs `quatrain` in children of its own, with small constants; each may end where it is told to.

A line of its input is a JSON list of runs [words, n] that are started at once; the answer is a list of
[exit code, calls, what it said on stderr]. A JSON string is a command for the shell, answered by its status. Before
its n-th call that changes a file (or in the middle of it, if it writes) a child is gone, as by SIGKILL: nothing is
flushed, closed or taken back.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from quatrain import cli
from quatrain.text import lines, parquet, reading
from quatrain.tokens import assembling, parts, progress, shards, tokenizing, writer

CONSTANTS: dict[Any, dict[str, int]] = {
    lines: {"CHUNK": 4000, "READ": 900},
    reading: {"READ": 900, "SPAN": 30_000},
    parquet: {"CHUNK": 4000, "IN_A_THREAD": 6000},
    tokenizing: {"UNIT_BYTES": 40_000, "PART_BYTES": 16_000},
    assembling: {"BLOCK": 20_000},
}
IMPORTED = (progress, writer)  # once, instead of in every child
DEAD = 99  # exit code of a child that ended as it was told

calls = 0


def shrink() -> None:
    for module, constants in CONSTANTS.items():
        for name, value in constants.items():
            assert hasattr(module, name), f"{module.__name__}.{name}"
            setattr(module, name, value)


def mortal(owner: Any, name: str, fatal: int) -> None:
    """Count the calls of a function, and die before the call of that number."""
    function: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        global calls
        calls += 1
        if calls == fatal:
            if isinstance(owner, type):  # a writer: half of the bytes are on disk
                file, data = arguments[0].file, memoryview(arguments[1]).cast("B")
                file.write(data[: len(data) // 2])
                file.flush()
            os._exit(DEAD)
        return function(*arguments, **named)

    setattr(owner, name, counted)


def child(words: list[str], fatal: int, answer: int) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.fsync = lambda descriptor: None  # a process that is gone loses nothing that it gave to the system
    for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
        mortal(os, name, fatal)
    mortal(parts.PartWriter, "_write", fatal)
    mortal(shards.HashedFile, "write", fatal)
    code = 98
    try:
        code = cli.main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(answer, str(calls).encode())
        os._exit(code)


def started(words: list[str], fatal: int) -> tuple[int, int, Any]:
    said = tempfile.TemporaryFile()  # noqa: SIM115  # closed when it is read
    reads, writes = os.pipe()
    process = os.fork()  # safe: this process has no threads
    if process == 0:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        child(words, fatal, writes)
    os.close(writes)
    return process, reads, said


def ended(process: int, answer: int, said: Any) -> tuple[int, int, str]:
    _, status = os.waitpid(process, 0)
    found = os.read(answer, 100)
    os.close(answer)
    with said:
        said.seek(0)
        return os.waitstatus_to_exitcode(status), int(found or 0), said.read().decode()


if __name__ == "__main__":
    shrink()
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, str):
            print(os.system(asked), flush=True)
        else:
            together = [started(words, fatal) for words, fatal in asked]
            print(json.dumps([ended(*one) for one in together]), flush=True)
