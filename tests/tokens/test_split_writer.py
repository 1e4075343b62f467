"""Shards are written, hashed and brought to the disk by several threads, and are what one thread would write."""

import hashlib
import threading

import numpy as np
import pytest

from quatrain.errors import QuatrainError
from quatrain.tokens import shards
from quatrain.tokens.shards import HashedFile, Piece, SplitWriter

EOT = 50_000
IDS = np.dtype("<u2")


def pieces(seed: int, sizes: list[int]) -> list[Piece]:
    draw = np.random.default_rng(seed)
    made = []
    for size in sizes:
        ids = draw.integers(0, EOT, size).astype(IDS)
        ids[0] = EOT
        made.append(Piece(ids, np.array([0]), 3 * size))
    return made


def test_small_and_large_writes_are_hashed_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "HASHED_AT_ONCE", 1000)
    monkeypatch.setattr(shards, "HASHED_LATER", 2)
    draw = np.random.default_rng(1)
    parts = [draw.bytes(int(size)) for size in draw.choice([0, 1, 999, 1000, 5000, 70_000], 200)]
    with HashedFile(tmp_path / "x") as file:
        for part in parts:
            file.write(part)
        assert not (tmp_path / "x").exists()
        file.finish()
    assert (tmp_path / "x").read_bytes() == b"".join(parts)
    assert file.sha256.hexdigest() == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("shard_size", [1, 7, 1000, 10**6])
def test_shards_are_the_ids_cut_at_their_size(tmp_path, monkeypatch, shard_size):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(shards, "HASHED_AT_ONCE", 8)
    made = pieces(2, [1, 300, 5, 2000, 9, 1000][: 3 if shard_size == 1 else 6])
    with SplitWriter(tmp_path, "x_train", IDS, EOT, shard_size) as writer:
        for piece in made:
            writer.add(piece)
        facts = writer.close()
    ids = np.concatenate([*(piece.ids for piece in made), np.array([EOT], dtype=IDS)])
    expected = [ids[start : start + shard_size] for start in range(0, len(ids), shard_size)]
    assert [shard["file"] for shard in facts["shards"]] == [f"x_train_{n:06d}.bin" for n in range(len(expected))]
    for shard, part in zip(facts["shards"], expected, strict=True):
        assert np.array_equal(np.fromfile(tmp_path / shard["file"], dtype=IDS), part)
        assert (shard["tokens"], shard["sha256"]) == (len(part), hashlib.sha256(part.tobytes()).hexdigest())
    assert (facts["tokens"], facts["documents"]) == (len(ids), len(made))
    assert facts["bytes"] == sum(piece.text_bytes for piece in made)


def test_no_thread_is_left_by_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(shards, "HASHED_AT_ONCE", 8)
    before = threading.active_count()
    with SplitWriter(tmp_path, "x_train", IDS, EOT, 50) as writer:
        writer.add(*pieces(3, [3000]))
        assert threading.active_count() <= before + 3  # the shard that is written, the one before, the index
    assert threading.active_count() == before


def test_a_shard_that_cannot_reach_the_disk_is_one_message_and_no_store(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def write() -> None:
        with SplitWriter(tmp_path, "x_train", IDS, EOT, 50) as writer:
            writer.add(*pieces(4, [300]))
            writer.close()

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(QuatrainError, match=r"x_train_000000\.bin: cannot write 100 bytes: No space left on device"):
        write()
    assert not list(tmp_path.glob("*.bin"))
