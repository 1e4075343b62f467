import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

import peers
from quatrain.errors import QuatrainError
from quatrain.interop.adoption import adopt
from quatrain.interop.config import AdoptConfig
from quatrain.tokens.config import DataConfig, PrepareConfig
from quatrain.tokens.loader import Batch, Loader
from quatrain.tokens.packing import IGNORED
from quatrain.tokens.rows import row_table
from quatrain.tokens.store import SeparatedStream, TokenStore, TokenStream
from quatrain.tokens.writer import prepare
from quatrain.training.selftest import check_first_batch


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("sharded") / "store"
    prepare(["corpus:sonnets"], folder, PrepareConfig(tokenizer="char", val_docs=(7,), shard_size=50))
    return TokenStore(folder)


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_a_right_batch_passes_across_shards(sharded: TokenStore, order: str) -> None:
    loader = Loader(sharded.train, DataConfig(seq_len=120, order=order), sharded.eot)
    check_first_batch(loader, sharded, "train", first_row=3, count=8)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """An adopted store whose eots stand in no file, but before each document of a Megatron index."""
    folder = tmp_path_factory.mktemp("indexed")
    documents = [list(range(1, number % 9 + 2)) for number in range(200)]
    peers.megatron(folder / "peer" / "x_train", documents)
    peers.megatron(folder / "peer" / "x_val", documents[:9])
    adopt(str(folder / "peer"), folder / "store", AdoptConfig(tokenizer="bytes"))
    return TokenStore(folder / "store")


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_a_right_batch_passes_where_the_index_supplies_the_eots(indexed: TokenStore, order: str) -> None:
    loader = Loader(indexed.train, DataConfig(seq_len=31, order=order), indexed.eot)
    check_first_batch(loader, indexed, "train", first_row=3, count=8)


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_right_rows_of_documents_pass_with_eots_in_the_files_and_by_index(
    sharded: TokenStore, indexed: TokenStore, packing: str
) -> None:
    for store, seq_len in ((sharded, 300), (sharded, 700), (indexed, 31)):
        loader = Loader(store.train, DataConfig(seq_len=seq_len, packing=packing), store.eot)
        check_first_batch(loader, store, "train", first_row=3, count=8)


def padding_counted(batch: Batch) -> Batch:
    return dataclasses.replace(batch, targets=torch.where(batch.targets == IGNORED, 0, batch.targets))


def documents_merged(batch: Batch) -> Batch:
    return dataclasses.replace(batch, documents=torch.ones_like(batch.documents))


@pytest.mark.parametrize("fault", [padding_counted, documents_merged])
def test_faults_of_packed_rows_are_found(
    indexed: TokenStore, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Batch], Batch]
) -> None:
    loader = Loader(indexed.train, DataConfig(seq_len=31, packing="pad"), indexed.eot)
    right = loader.batch
    monkeypatch.setattr(loader, "batch", lambda first_row, count: fault(right(first_row, count)))
    with pytest.raises(QuatrainError, match="row 0 of the train split is not what its files hold"):
        check_first_batch(loader, indexed, "train", first_row=0, count=8)


def test_a_piece_that_runs_on_into_the_next_document_is_found(indexed: TokenStore) -> None:
    """An index that lacks every second document: the eots in the ids tell."""
    halved = SeparatedStream(indexed.train.pieces, indexed.document_starts("train"), indexed.eot)
    table = row_table(TokenStream([np.asarray(halved)], halved.starts[::2]), 31, "best_fit")
    loader = Loader(indexed.train, DataConfig(seq_len=31, packing="best_fit"), indexed.eot)
    loader.table = table
    with pytest.raises(QuatrainError, match="row 0 of the train split is not what its files hold"):
        check_first_batch(loader, indexed, "train", first_row=0, count=8)


def test_an_eot_that_is_read_in_another_place_is_found(indexed: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SeparatedStream(indexed.train.pieces, indexed.document_starts("train") + np.uint64(1), indexed.eot)
    loader = Loader(stream, DataConfig(seq_len=31), indexed.eot)
    with pytest.raises(QuatrainError, match="of the train split is not what its files hold"):
        check_first_batch(loader, indexed, "train", first_row=0, count=8)


def targets_equal_to_inputs(batch: Batch) -> Batch:
    return dataclasses.replace(batch, targets=batch.inputs)


def shifted_the_wrong_way(batch: Batch) -> Batch:
    return dataclasses.replace(batch, inputs=batch.targets, targets=batch.inputs)


def another_id(batch: Batch) -> Batch:
    inputs = torch.where(torch.arange(batch.inputs.shape[1]) == 7, batch.inputs + 1, batch.inputs)
    return dataclasses.replace(batch, inputs=inputs)


@pytest.mark.parametrize("fault", [targets_equal_to_inputs, shifted_the_wrong_way, another_id])
def test_the_classic_shifts_are_found(sharded: TokenStore, monkeypatch: pytest.MonkeyPatch, fault: object) -> None:
    loader = Loader(sharded.train, DataConfig(seq_len=64), sharded.eot)
    right = loader.batch
    monkeypatch.setattr(loader, "batch", lambda first_row, count: fault(right(first_row, count)))
    with pytest.raises(QuatrainError, match="row 0 of the train split is not what its files hold"):
        check_first_batch(loader, sharded, "train", first_row=0, count=4)
