"""Ranks without their processes; two real ones are in tests/commands/test_evaluate_command.py."""

import numpy as np
import pytest
import torch

from quatrain.errors import QuatrainError
from quatrain.inference.ranks import ALONE, Ranks, join, own_device


@pytest.mark.parametrize("world_size", [1, 2, 3, 23, 25])
def test_each_thing_is_one_ranks(world_size: int) -> None:
    ranks = [Ranks(rank, world_size) for rank in range(world_size)]
    assert all(sum(one.has(number) for one in ranks) == 1 for number in range(23))


def test_one_process_joins_nothing_and_sums_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.array([1.0, -np.inf])
    for value in (None, "1"):  # torchrun starts one process with WORLD_SIZE=1
        monkeypatch.delenv("WORLD_SIZE", raising=False) if value is None else monkeypatch.setenv("WORLD_SIZE", value)
        assert join() == ALONE
        assert join().sum(numbers) is numbers


def test_a_rank_that_has_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(total: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_reduce", gone)
    with pytest.raises(QuatrainError, match="rank 1 waited for a rank that has ended: Connection closed by peer"):
        Ranks(1, 2).sum(np.zeros(3))


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    ranks = Ranks(11, 16)
    assert [own_device(name, ranks) for name in ("auto", "cuda", "cuda:1", "cpu")] == [
        "cuda:3",
        "cuda:3",
        "cuda:1",
        "cpu",
    ]
    assert own_device("auto", ALONE) == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device("auto", ranks) == "auto"
