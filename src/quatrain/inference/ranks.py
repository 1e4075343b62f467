"""Several processes that share an evaluation, as `torchrun` starts them: each computes its part, all know the sums."""

import atexit
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from quatrain.errors import QuatrainError, UsageError

Floats = npt.NDArray[np.float64]


class Ranks(NamedTuple):
    """Which of how many processes it is."""

    rank: int = 0
    world_size: int = 1

    def has(self, number: int) -> bool:
        """Whether the thing of this number, counted from 0, is this rank's: each is one rank's."""
        return number % self.world_size == self.rank

    def sum(self, numbers: Floats) -> Floats:
        """The sum over all ranks, on each. Where one rank alone has another number than 0, its bits are kept."""
        if self.world_size == 1:
            return numbers
        total = torch.from_numpy(numbers.copy())
        try:
            distributed.all_reduce(total)
        except RuntimeError as error:
            raise QuatrainError(f"rank {self.rank} waited for a rank that has ended: {error}") from error
        found: Floats = total.numpy()
        return found


ALONE = Ranks()


def join() -> Ranks:
    """The ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), joined by gloo to the end.

    Raises `UsageError` for an environment in which they do not find each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    try:
        distributed.init_process_group("gloo")
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"WORLD_SIZE is set, and the ranks do not find each other; use torchrun: {error}") from error
    atexit.register(distributed.destroy_process_group)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def own_device(name: str, ranks: Ranks) -> str:
    """The name of a rank's device: `auto` and `cuda` mean the GPU of its local number."""
    if ranks.world_size == 1 or name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    return f"cuda:{os.environ.get('LOCAL_RANK', ranks.rank)}"
