"""What is checked at the start of a run rather than believed."""

import numpy as np
import torch

from quatrain.errors import QuatrainError
from quatrain.tokens.loader import Loader
from quatrain.tokens.order import window_starts
from quatrain.tokens.store import SplitName, TokenStore


def check_first_batch(loader: Loader, store: TokenStore, split: SplitName, first_row: int, count: int) -> None:
    """Read the windows of some rows again, straight from the files, and compare them with the loader's batch.

    Inputs must be the ids that stand there and targets the ids one ahead: the two classic shifts
    (targets equal to inputs, or one behind) give a loss near zero without any error.
    """
    config = loader.config
    rows = np.arange(first_row, first_row + count, dtype=np.int64)
    starts = window_starts(config.order, len(loader.stream), config.seq_len, config.seed, rows)
    batch = loader.batch(first_row, count)
    for row, start in enumerate(starts.tolist()):
        ids = torch.tensor(_ids_on_disk(store, split, start, config.seq_len + 1))
        if not (batch.inputs[row].cpu().equal(ids[:-1]) and batch.targets[row].cpu().equal(ids[1:])):
            raise QuatrainError(
                f"row {first_row + row} of the {split} split is not what its files hold from id {start} on: "
                f"the files changed while they were read, or the loader is wrong; check with: "
                f"quatrain inspect {store.folder} --verify"
            )


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
