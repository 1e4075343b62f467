"""Run folders as a page sees them: by short names, never by paths, and read while they are being written."""

import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from quatrain.errors import DataError, QuatrainError
from quatrain.model.config import ModelConfig
from quatrain.model.pretrained import parameter_count
from quatrain.tokens.store import TokenStore
from quatrain.training.checkpoint import checkpoints, run_of
from quatrain.training.flops import flops_per_token
from quatrain.training.metrics import Row, whole_rows
from quatrain.web.refusals import Refused

AT_ONCE = 1 << 20  # bytes of a file that one answer holds, about
MARKED = 256  # bytes before a place by which it is known again
NOT_SHOWN = ("ids", "data_hash")  # keys of rows that no view needs


class NotHere(Refused):
    """What was asked for is not on this machine, or not shown."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)


@dataclass(frozen=True)
class Rows:
    """A piece of a file of rows; `start` is 0 where the reader must forget what it read before."""

    rows: list[Row]
    start: int  # the byte at which the piece begins
    next: int  # and the one behind it, to be asked for next
    mark: str  # by which `next` is known again
    more: bool  # whether more whole lines may be there already


def named(folders: Iterable[Path]) -> dict[str, Path]:
    """Run folders by the shortest endings of their paths that differ; a checkpoint stands for its run."""
    found = dict.fromkeys((run_of(folder) or folder.resolve()) for folder in folders)
    return {_short_name(folder, [other for other in found if other != folder]): folder for folder in found}


def _short_name(folder: Path, others: list[Path]) -> str:
    parts = folder.parts[1:] or folder.parts
    for count in range(1, len(parts) + 1):
        if not any(other.parts[-count:] == parts[-count:] for other in others):
            return "/".join(parts[-count:])
    return "/".join(parts)


def read_rows(path: Path, after: int = 0, mark: str = "") -> Rows:
    """The whole lines behind byte `after`, or from the start where the file is not the one that was read before.

    `after` and `mark` are `next` and `mark` of the answer before. What is behind the first line that is not whole is
    left for the next call, and a file that is absent has no rows.
    """
    try:
        with path.open("rb") as file:
            start = after if after > 0 and _mark(file, after) == mark else 0
            file.seek(start)
            found = list(whole_rows(_whole_lines(file)))
            size = sum(len(line) for line, _ in found)
            rows = [{key: value for key, value in row.items() if key not in NOT_SHOWN} for _, row in found]
            return Rows(rows, start, start + size, _mark(file, start + size), size >= AT_ONCE // 2)
    except OSError:
        return Rows([], 0, 0, "", False)


def _whole_lines(file: BinaryIO) -> bytes:
    block = file.read(AT_ONCE)
    whole = block.rfind(b"\n") + 1
    if not whole and len(block) == AT_ONCE:  # one line longer than an answer
        block += file.readline()
        whole = block.rfind(b"\n") + 1
    return block[:whole]


def _mark(file: BinaryIO, place: int) -> str:
    """What stands before a byte of a file: a file cut back and written anew differs there in its times."""
    first = max(0, place - MARKED)
    file.seek(first)
    before = file.read(place - first)
    return hashlib.sha256(before).hexdigest()[:16] if len(before) == place - first else ""


def describe(name: str, run: Path) -> dict[str, Any]:
    """What the views need of a run beside its rows; what is not known is None."""
    recipe = _recipe(run)
    length, model = _number(recipe, "data", "seq_len"), recipe.get("model", {})
    size = _size(json.dumps(model, sort_keys=True, default=str), length or 0)
    return {
        "name": name,
        "steps": _number(recipe, "train", "steps"),
        "seq_len": length,
        "vocab_size": _number(recipe, "model", "vocab_size"),
        "checkpoints": [step for step, _ in checkpoints(run)],
        **size,
        **_store(run),
    }


def seq_len(run: Path) -> int:
    """The length of a run's windows; 1 where its recipe is not there yet."""
    return _number(_recipe(run), "data", "seq_len") or 1


def _recipe(run: Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's recipe, which may not be there yet, or be anything: others' runs are shown too."""
    try:
        found = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: section for name, section in found.items() if isinstance(section, dict)}


def _number(recipe: dict[str, dict[str, Any]], section: str, key: str) -> int | None:
    value = recipe.get(section, {}).get(key)
    return value if isinstance(value, int) and 0 < value < 1 << 53 else None


@lru_cache(maxsize=64)
def _size(model: str, seq_len: int) -> dict[str, int | None]:
    """Parameters, and FLOPs of training on one token, of a `[model]` section as JSON."""
    try:
        config = ModelConfig(**json.loads(model))
        return {"parameters": parameter_count(config), "flops_per_token": flops_per_token(config, seq_len)}
    except (TypeError, ValueError, QuatrainError):
        return {"parameters": None, "flops_per_token": None}


def _store(run: Path) -> dict[str, Any]:
    """Name of the run's store, and the bytes of text behind one validation target, where it tells them."""
    try:
        store = open_store(run)
    except NotHere:
        return {"store": store_folder(run).name, "bytes_per_token": None}
    val = store.facts["splits"]["val"]
    targets, size = val["tokens"] - 1, val.get("bytes")
    return {
        "store": store.folder.name,
        "bytes_per_token": size / targets if size and targets > 0 else None,
    }


def store_folder(run: Path) -> Path:
    """The folder of the store that a run was trained on; the one inside the run where it was moved with it."""
    told = str(_recipe(run).get("data", {}).get("store", ""))
    inside = run / "store"
    return inside if not told or (inside.is_dir() and not Path(told).is_dir()) else Path(told)


def open_store(run: Path) -> TokenStore:
    """The store of a run; raises `NotHere`, without a path of this machine, where it is not here."""
    folder = store_folder(run)
    try:
        return TokenStore(folder)
    except (DataError, OSError) as error:
        raise NotHere(
            f"the token store of this run, '{folder.name}', cannot be read on this machine; where it is, look "
            f"at it with: quatrain inspect STORE"
        ) from error
