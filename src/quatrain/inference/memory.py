"""Answers that an interrupted evaluation leaves in the run, so that the same command goes on from them."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from quatrain.files import replace_file, writing
from quatrain.inference.endings import NOTHING_KEPT, Kept

FOLDER = "evaluating"


class KeptAnswers:
    """One file for each way of a task, in RUN/evaluating; `forget` removes them when the evaluation is whole."""

    def __init__(self, run: Path | None, model: str) -> None:
        """Without a run nothing is kept. `model` tells checkpoints apart: answers depend on their weights."""
        self.folder = run / FOLDER if run else None
        self.model = model
        self.files: list[Path] = []

    def __call__(self, key: str) -> Kept:
        """What is kept under a key, and how to keep more. A line that is not whole ends what is known."""
        if self.folder is None:
            return NOTHING_KEPT
        path = self.folder / f"{hashlib.sha256(f'{self.model} {key}'.encode()).hexdigest()[:32]}.jsonl"
        self.files.append(path)
        known: dict[int, list[tuple[float, bool]]] = {}
        kept = b""
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            known[row["batch"]] = [(logprob, likeliest) for logprob, likeliest in row["answers"]]
            kept += line
        if path.exists() and path.stat().st_size > len(kept):
            replace_file(path, kept)
        return Kept(known.get, _keeper(path))

    def forget(self) -> None:
        """The evaluation is whole."""
        for path in self.files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another evaluation's files are in it, or it never was
            if self.folder is not None:
                self.folder.rmdir()


def _keeper(path: Path) -> Callable[[int, list[tuple[float, bool]]], None]:
    def keep(batch: int, answers: list[tuple[float, bool]]) -> None:
        line = json.dumps({"batch": batch, "answers": answers}) + "\n"
        with writing(path, len(line)):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line)

    return keep
