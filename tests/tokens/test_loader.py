import hashlib
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.tokens import loader as loader_module
from quatrain.tokens.config import DataConfig, PrepareConfig
from quatrain.tokens.loader import Loader, batch_of
from quatrain.tokens.order import window_starts
from quatrain.tokens.packing import IGNORED, packed_mask
from quatrain.tokens.store import TokenStore, TokenStream
from quatrain.tokens.writer import prepare


def positions_stream(*sizes: int) -> TokenStream:
    """A stream in which every id is its position, in shards of these sizes."""
    return TokenStream(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The sonnets again, in shards of 700 ids, the last one shorter: documents cross the borders."""
    folder = tmp_path_factory.mktemp("sharded") / "store"
    prepare(["corpus:sonnets"], folder, PrepareConfig(tokenizer="char", val_docs=(7,), shard_size=700))
    return TokenStore(folder)


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_a_batch_holds_the_windows_of_its_rows_as_int64(order):
    loader = Loader(positions_stream(60, 41), DataConfig(seq_len=8, order=order, seed=3), eot=0)
    assert loader.rows_per_epoch == 12
    batch = loader.batch(10, 5)  # two rows of this epoch, three of the next
    starts = window_starts(order, 101, 8, 3, np.arange(10, 15))
    assert batch.inputs.tolist() == [list(range(s, s + 8)) for s in starts]
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.valid == 40
    assert batch.documents is None
    assert batch.positions is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_case_01_02_03_04_an_epoch_of_a_store_on_disk_holds_each_target_once_whatever_the_ranks(sharded, world_size):
    T, rows_per_rank = 16, 4
    loaders = [Loader(sharded.train, DataConfig(seq_len=T), sharded.eot) for _ in range(world_size)]
    k, rows_per_step = loaders[0].rows_per_epoch, rows_per_rank * world_size
    found = []
    for step in range(-(-k // rows_per_step)):
        for rank, loader in enumerate(loaders):
            found.append(loader.batch(step * rows_per_step + rank * rows_per_rank, rows_per_rank).targets)
    targets = torch.cat(found)[:k]

    files = sorted(sharded.folder.glob("*_train_*.bin"))
    assert len(files) == 7
    stream = np.concatenate([np.fromfile(file, dtype="<u2") for file in files])
    omitted = (len(stream) - 1) % T
    assert targets.numel() == len(stream) - 1 - omitted
    missing = Counter(stream[1:].tolist())
    missing.subtract(targets.flatten().tolist())
    assert min(missing.values()) >= 0
    assert missing.total() == omitted


@given(rows_per_rank=st.integers(1, 3), world_size=st.integers(1, 4), step=st.integers(0, 40), micro=st.integers(1, 12))
def test_any_ranks_and_micro_batches_see_the_same_global_batch(rows_per_rank, world_size, step, micro):
    loader = Loader(positions_stream(90, 111), DataConfig(seq_len=10), eot=0)
    count = rows_per_rank * world_size
    whole = loader.batch(step * count, count).inputs
    slices = [loader.batch(step * count + rank * rows_per_rank, rows_per_rank).inputs for rank in range(world_size)]
    assert torch.equal(torch.cat(slices), whole)
    cut = [loader.batch(step * count + at, min(micro, count - at)).inputs for at in range(0, count, micro)]
    assert torch.equal(torch.cat(cut), whole)


def test_case_05_ranks_never_share_a_batch(monkeypatch):
    def hashes():
        loaders = [Loader(positions_stream(500, 501), DataConfig(seq_len=10), eot=0) for _ in range(8)]
        return {loader.hash_of(rank * 4, 4) for rank, loader in enumerate(loaders)}

    assert len(hashes()) == 8
    monkeypatch.setattr(loader_module, "window_starts", lambda order, n, T, seed, rows: np.arange(len(rows)) * T)
    assert len(hashes()) == 1  # the fault: the rank never enters


def test_the_hash_is_that_of_the_windows_whatever_the_packing():
    stream = positions_stream(70, 31)
    concat, document = (Loader(stream, DataConfig(seq_len=9, packing=p), eot=0) for p in ("concat", "document"))
    batch = concat.batch(5, 3)
    windows = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1).numpy()
    assert concat.hash_of(5, 3) == hashlib.sha256(windows.astype("<i8").tobytes()).hexdigest()
    assert document.hash_of(5, 3) == concat.hash_of(5, 3)
    assert concat.hash_of(6, 3) != concat.hash_of(5, 3)


def test_the_hash_of_many_rows_is_that_of_their_windows_in_one():
    loader = Loader(positions_stream(70, 31), DataConfig(seq_len=9), eot=0)
    batch = loader.batch(5, 700)
    windows = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1).numpy()
    assert loader.hash_of(5, 700) == hashlib.sha256(windows.astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_starts_that_were_computed_along_are_those_of_their_rows_however_one_jumps(order, monkeypatch):
    monkeypatch.setattr(loader_module, "STARTS_AT_ONCE", 7)
    loader = Loader(positions_stream(101), DataConfig(seq_len=8, order=order), eot=0)
    for first, count in [(0, 3), (3, 3), (6, 2), (5, 2), (0, 7), (1, 7), (40, 30), (12, 1), (3, 0), (69, 2)]:
        rows = np.arange(first, first + count)
        assert loader.batch(first, count).inputs[:, 0].tolist() == window_starts(order, 101, 8, 1337, rows).tolist()


def test_a_batch_is_gathered_for_another_device_when_one_is_named():
    loader = Loader(positions_stream(101), DataConfig(seq_len=8), 0, "meta")
    assert loader.batch(3, 2).inputs.device.type == "meta"
    assert loader.batch(3, 2, torch.device("cpu")).inputs.device.type == "cpu"


@given(first=st.integers(0, 100), count=st.integers(1, 40))
def test_the_valid_targets_of_rows_are_known_without_reading_them(first, count):
    loader = Loader(positions_stream(90, 111), DataConfig(seq_len=10), eot=0)
    valid = loader.valid(first, count)
    assert valid == loader.batch(first, count).valid == int((loader.batch(first, count).targets != IGNORED).sum())


def test_case_11_14_15_a_row_is_the_same_for_a_fresh_loader_in_any_epoch():
    stream, config = positions_stream(101), DataConfig(seq_len=8)
    used, k = Loader(stream, config, eot=0), 12
    epochs = [used.batch(epoch * k, k).inputs for epoch in range(4)]
    for epoch in (3, 1, 2, 0):
        assert torch.equal(Loader(stream, config, eot=0).batch(epoch * k, k).inputs, epochs[epoch])
    assert len({tuple(epoch.flatten().tolist()) for epoch in epochs}) == 4


def test_case_12_the_seed_of_the_settings_decides_the_order():
    def rows(seed: int) -> list[list[int]]:
        return Loader(positions_stream(1001), DataConfig(seq_len=8, seed=seed), eot=0).batch(0, 100).inputs.tolist()

    assert rows(1) == rows(1)
    assert sum(one == other for one, other in zip(rows(1), rows(2), strict=True)) < 10


def test_case_13_shuffling_is_the_default():
    assert DataConfig().order == "shuffle"


def test_sequential_order_hands_over_the_last_target_across_shards(sharded):
    loader = Loader(sharded.train, DataConfig(seq_len=16, order="sequential"), sharded.eot)
    batches = [loader.batch(first, 3) for first in range(0, loader.rows_per_epoch - 2, 3)]
    for one, following in pairwise(batches):
        assert one.targets[-1, -1] == following.inputs[0, 0]
    inputs = torch.cat([batch.inputs for batch in batches]).flatten()
    assert inputs.tolist() == sharded.train[: len(inputs)].tolist()


def test_document_packing_adds_documents_and_positions_to_the_same_windows(sharded):
    batches = {
        packing: Loader(sharded.train, DataConfig(seq_len=300, packing=packing), sharded.eot).batch(0, 10)
        for packing in ("concat", "document")
    }
    packed = batches["document"]
    assert torch.equal(packed.inputs, batches["concat"].inputs)
    assert torch.equal(packed.targets, batches["concat"].targets)  # no target is masked
    assert packed.valid == batches["concat"].valid == 3000
    assert packed.documents.max() > 0
    for inputs, documents, positions in zip(packed.inputs, packed.documents, packed.positions, strict=True):
        mask, expected = packed_mask(inputs.numpy(), sharded.eot)
        assert positions.tolist() == expected.tolist()
        assert torch.equal((documents[:, None] == documents[None, :]).tril(), torch.from_numpy(mask))


def test_the_target_eot_belongs_to_the_document_that_it_ends():
    windows = np.array([[9, 1, 2, 9, 3, 4, 9]])
    batch = batch_of(windows, "document", 9, torch.device("cpu"))
    assert batch.targets.tolist() == [[1, 2, 9, 3, 4, 9]]
    assert batch.documents.tolist() == [[1, 1, 1, 2, 2, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2]]


def test_case_06_a_split_of_one_window_gives_it_in_every_epoch():
    loader = Loader(positions_stream(9), DataConfig(seq_len=8), eot=0)
    assert loader.rows_per_epoch == 1
    assert loader.batch(0, 3).inputs.tolist() == [list(range(8))] * 3


def test_case_08_a_split_shorter_than_a_window_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"has 8 ids.*seq_len 8 needs 9"):
        Loader(positions_stream(8), DataConfig(seq_len=8), eot=0)


# What a model makes of packed rows

PACKED = ["document", "pad", "best_fit"]


def short_documents(changed: int | None = None) -> TokenStream:
    """Forty documents of 1 to 24 targets; one of them may have other ids in the same places."""
    rng = np.random.default_rng(8)
    documents = [np.append(49, rng.integers(0, 49, rng.integers(0, 24))) for _ in range(40)]
    if changed is not None:
        documents[changed][1:] = 48 - documents[changed][1:]
    starts = np.cumsum([0, *map(len, documents)])[:-1].astype(np.uint64)
    return TokenStream([np.append(np.concatenate(documents), 49)], starts)


def tiny_network(**changes: object) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 50} | changes
    model = GPT(ModelConfig(**shape), torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model.eval()


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("packing", PACKED)
def test_case_41_42_another_document_in_the_row_changes_no_logit_of_the_others(packing, position):
    """The ids of every row's first document change; logits of all the others stay, to the bit."""
    model = tiny_network(position=position)
    before, after = Loader(short_documents(), DataConfig(seq_len=32, packing=packing), 49).batch(0, 20), None
    inputs = torch.where(before.documents == before.documents[:, :1], (before.inputs + 7) % 49, before.inputs)
    with torch.no_grad():
        logits = model(before.inputs, before.documents, before.positions)
        after = model(inputs, before.documents, before.positions)
        leaking = model(inputs, None, before.positions)  # the fault: positions restart, and attention crosses
        kept = model(before.inputs, None, before.positions)
    others = before.documents != before.documents[:, :1]
    assert 0 < others.sum() < others.numel() or packing == "pad"
    assert torch.equal(after[others], logits[others])
    assert not torch.equal(after[~others], logits[~others])
    assert not torch.equal(leaking[others], kept[others])


@pytest.mark.parametrize("packing", PACKED)
def test_case_41_42_no_gradient_flows_across_documents(packing):
    model = tiny_network()
    batch = Loader(short_documents(), DataConfig(seq_len=32, packing=packing), 49).batch(0, 12)
    embedded = []
    model.transformer["wte"].register_forward_hook(lambda module, ids, out: embedded.append(out) or out.retain_grad())
    logits = model(batch.inputs, batch.documents, batch.positions)
    chosen = batch.documents == batch.documents[:, -1:]  # the last document of each row, or its padding
    logits[chosen].logsumexp(-1).sum().backward()
    assert (embedded[0].grad[~chosen] == 0).all()
    assert (embedded[0].grad[chosen] != 0).any()


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_a_piece_has_the_logits_that_it_has_alone(packing):
    model, stream = tiny_network(), short_documents()
    loader = Loader(stream, DataConfig(seq_len=16, packing=packing), 49)
    batch = loader.batch(0, loader.rows_per_epoch)
    with torch.no_grad():
        logits = model(batch.inputs, batch.documents, batch.positions)
        for row, number in enumerate(loader.table_rows(0, loader.rows_per_epoch).tolist()):
            at = 0
            for first, length in loader.table.pieces(number):
                alone = model(torch.from_numpy(stream.read(first, first + length))[None])[0]
                assert torch.allclose(logits[row, at : at + length], alone, atol=1e-5)
                at += length
