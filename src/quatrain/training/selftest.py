"""What is checked at the start of a run rather than believed."""

import numpy as np

from quatrain.errors import QuatrainError
from quatrain.tokens.loader import Loader
from quatrain.tokens.order import window_starts
from quatrain.tokens.packing import IGNORED
from quatrain.tokens.store import SplitName, TokenStore


def check_first_batch(loader: Loader, store: TokenStore, split: SplitName, first_row: int, count: int) -> None:
    """Read some rows again, straight from the files, and compare them with the loader's batch.

    Inputs must be the ids that stand there and targets the ids one ahead: the two classic shifts
    (targets equal to inputs, or one behind) give a loss near zero without any error. In rows of
    documents no piece may run on behind an eot, and what no piece covers must be ignored.
    """
    batch = loader.batch(first_row, count)
    for row, pieces in enumerate(_pieces(loader, first_row, count)):
        found = [batch.inputs[row].tolist(), batch.targets[row].tolist()]
        expected = _inputs_and_targets(store, split, pieces, loader.config.seq_len)
        if loader.table is not None and batch.documents is not None:
            found.append(batch.documents[row].tolist())
            expected.append(_numbered(pieces, loader.config.seq_len))
        if found != expected or (loader.table is not None and _run_on(store.eot, expected)):
            raise QuatrainError(
                f"row {first_row + row} of the {split} split is not what its files hold from id {pieces[0][0]} on: "
                f"the files changed while they were read, or the loader is wrong; check with: "
                f"quatrain inspect {store.folder} --verify"
            )


def _pieces(loader: Loader, first_row: int, count: int) -> list[list[tuple[int, int]]]:
    """Of each row the first inputs and the targets of what stands in it: one window, or pieces of documents."""
    config = loader.config
    if loader.table is not None:
        return [loader.table.pieces(row) for row in loader.table_rows(first_row, count).tolist()]
    rows = np.arange(first_row, first_row + count, dtype=np.int64)
    starts = window_starts(config.order, len(loader.stream), config.seq_len, config.seed, rows)
    return [[(start, config.seq_len)] for start in starts.tolist()]


def _inputs_and_targets(
    store: TokenStore, split: SplitName, pieces: list[tuple[int, int]], seq_len: int
) -> list[list[int]]:
    inputs, targets = [], []
    for first, length in pieces:
        ids = _ids_on_disk(store, split, first, length + 1)
        inputs += ids[:-1]
        targets += ids[1:]
    padding = seq_len - len(targets)
    return [inputs + [store.eot] * padding, targets + [IGNORED] * padding]


def _numbered(pieces: list[tuple[int, int]], seq_len: int) -> list[int]:
    numbers = [number for number, (_, length) in enumerate(pieces, start=1) for _ in range(length)]
    return numbers + [len(pieces) + 1] * (seq_len - len(numbers))


def _run_on(eot: int, row: list[list[int]]) -> bool:
    """Whether a document's target eot is followed by more of the same document."""
    _, targets, documents = row
    return any(targets[at] == eot and documents[at] == documents[at + 1] for at in range(len(targets) - 1))


def _ids_on_disk(store: TokenStore, split: SplitName, start: int, length: int) -> list[int]:
    facts = store.facts["splits"][split]
    if not facts.get("eot_by_index"):
        return _ids_in_shards(store, split, start, length)
    index = np.memmap(store.folder / facts["idx"]["file"], dtype="<u8", mode="r")
    first, after = np.searchsorted(index, np.array([start, start + length], dtype="<u8")).tolist()
    ids = _ids_in_shards(store, split, start - first, length - (after - first))
    for place in index[first:after].tolist():
        ids.insert(place - start, store.eot)
    return ids


def _ids_in_shards(store: TokenStore, split: SplitName, start: int, length: int) -> list[int]:
    ids: list[int] = []
    passed = 0  # ids in the shards so far
    for shard in store.facts["splits"][split]["shards"]:
        size = np.dtype(shard["dtype"]).itemsize
        first = start + len(ids) - passed
        if 0 <= first < shard["tokens"] and len(ids) < length:
            with (store.folder / shard["file"]).open("rb") as file:
                file.seek(shard["offset"] + first * size)
                data = file.read(min(length - len(ids), shard["tokens"] - first) * size)
            ids += [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]
        passed += shard["tokens"]
    return ids
