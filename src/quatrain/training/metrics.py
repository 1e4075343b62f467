"""metrics.jsonl and samples.jsonl: one object a line, cut back to the checkpoint at resume."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quatrain.files import replace_file, writing

Row = dict[str, Any]


class JsonLines:
    """A file of rows that each have a `step`; every row is handed to the system as it comes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Row) -> None:
        """Add one row. Floats are written so that they read back as the same number."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self.path, len(line)), self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def rows(self) -> list[Row]:
        """All rows up to the first line that is not whole."""
        return [row for _, row in self._read()]

    def trained(self) -> list[Row]:
        """The rows of training steps."""
        return [row for row in self.rows() if "loss" in row]

    def validated(self) -> list[Row]:
        """The rows of validations."""
        return [row for row in self.rows() if "val_loss" in row]

    def cut(self, step: int) -> None:
        """Keep the whole rows up to and including this step."""
        if self.path.exists():
            replace_file(self.path, b"".join(line for line, row in self._read() if row["step"] <= step))

    def _read(self) -> Iterator[tuple[bytes, Row]]:
        return whole_rows(self.path.read_bytes()) if self.path.exists() else iter(())


def whole_rows(content: bytes) -> Iterator[tuple[bytes, Row]]:
    """Lines with their rows, up to the first line that is not whole: nothing counts behind a write that was cut."""
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # what cannot be written was not written here
        except (ValueError, RecursionError):
            return
        if not line.endswith(b"\n") or not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return
        yield line, row


def data_wait(trained: list[Row]) -> float | None:
    """The share of the time of these steps that was spent waiting for data; None without steps."""
    seconds = [1 / row["tokens_per_second"] for row in trained]  # of a token: steps have equally many
    waited = [share * row.get("data_wait", 0.0) for share, row in zip(seconds, trained, strict=True)]
    return round(sum(waited) / sum(seconds), 4) if trained else None
