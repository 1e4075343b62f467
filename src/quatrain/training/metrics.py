"""metrics.jsonl and samples.jsonl: one object a line, cut back to the checkpoint at resume."""

import json
from pathlib import Path
from typing import Any

from quatrain.files import replace_file, writing

Row = dict[str, Any]


class JsonLines:
    """A file of rows that each have a `step`; every row is on disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Row) -> None:
        """Add one row. Floats are written so that they read back as the same number."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self.path, len(line)), self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def rows(self) -> list[Row]:
        """All whole rows."""
        return [json.loads(line) for line in self._whole_lines()]

    def cut(self, step: int) -> None:
        """Keep the whole rows up to and including this step."""
        kept = [line for line in self._whole_lines() if json.loads(line)["step"] <= step]
        if self.path.exists():
            replace_file(self.path, b"".join(kept))

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines(keepends=True)
        return [line for line in lines if line.endswith(b"\n")]
