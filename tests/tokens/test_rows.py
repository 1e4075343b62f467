"""Rows of documents: every target once, pieces where a naive best-fit-decreasing puts them, and few rows."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peers
from quatrain.errors import DataError
from quatrain.interop.adoption import adopt
from quatrain.interop.config import AdoptConfig
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.packing import IGNORED, padding_waste
from quatrain.tokens.rows import RowTable, best_fit, row_table
from quatrain.tokens.store import TokenStore, TokenStream

MODES = ["pad", "best_fit"]
DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)  # targets of each
EOT = 10**6


def stream_of(targets: list[int]) -> TokenStream:
    """Documents of so many targets each, in which every id is its position, over two pieces."""
    ends = np.cumsum([0, *targets])
    ids = np.arange(ends[-1] + 1)
    return TokenStream(np.array_split(ids, 2), ends[:-1].astype(np.uint64))


def naive_pieces(targets: list[int], T: int) -> list[tuple[int, int]]:
    found, start = [], 0
    for length in targets:
        found += [(start + at, min(T, length - at)) for at in range(0, length, T)]
        start += length
    return found


def naive_best_fit(pieces: list[tuple[int, int]], T: int) -> list[list[tuple[int, int]]]:
    """One piece after the other, the longest first, into the fullest row that holds it, the last to become so."""
    rows: list[list[tuple[int, int]]] = []
    full: list[tuple[int, int]] = []  # of each row its targets, and when it came to them
    for now, piece in enumerate(sorted(pieces, key=lambda piece: -piece[1])):
        fitting = [row for row in range(len(rows)) if full[row][0] + piece[1] <= T]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            full.append((0, now))
        best = max(fitting, key=full.__getitem__)
        rows[best].append(piece)
        full[best] = (full[best][0] + piece[1], now)
    return sorted(sorted(row) for row in rows)


def fewest_rows(lengths: list[int], T: int) -> int:
    """The optimum, by trying all ways."""

    def holds(left: list[int], rooms: list[int]) -> bool:
        if not left:
            return True
        for at in {room: at for at, room in enumerate(rooms) if room >= left[0]}.values():
            if holds(left[1:], [room - left[0] * (at == other) for other, room in enumerate(rooms)]):
                return True
        return False

    longest_first = sorted(lengths, reverse=True)
    return next(count for count in itertools.count(-(-sum(lengths) // T)) if holds(longest_first, [T] * count))


def contents(table: RowTable) -> list[list[int]]:
    return [[length for _, length in table.pieces(row)] for row in range(table.rows)]


@given(targets=DOCUMENTS, T=st.integers(1, 45), packing=st.sampled_from(MODES))
def test_rows_hold_every_piece_of_every_document_once(targets, T, packing):
    table = row_table(stream_of(targets), T, packing)
    pieces = [piece for row in range(table.rows) for piece in table.pieces(row)]
    assert sorted(pieces) == naive_pieces(targets, T)
    assert max(map(sum, contents(table))) <= T
    assert (table.documents, table.cut) == (len(targets), sum(length > T for length in targets))
    assert (table.targets, table.padding) == (sum(targets), table.rows * T - sum(targets))
    rows = [table.pieces(row) for row in range(table.rows)]
    assert all(row == sorted(row) for row in rows)
    assert rows == sorted(rows)  # by their first piece


@given(targets=DOCUMENTS, T=st.integers(1, 45))
def test_pad_wastes_what_padding_waste_says(targets, T):
    table = row_table(stream_of(targets), T, "pad")
    assert (table.rows, table.padding) == padding_waste(targets, T)
    assert {len(row) for row in contents(table)} == {1}


@given(targets=st.lists(st.integers(1, 60), min_size=1, max_size=60), T=st.integers(1, 45))
def test_best_fit_fills_rows_as_piece_after_piece_would(targets, T):
    table = row_table(stream_of(targets), T, "best_fit")
    assert [table.pieces(row) for row in range(table.rows)] == naive_best_fit(naive_pieces(targets, T), T)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), T=st.integers(12, 16))
def test_best_fit_is_near_the_fewest_rows_that_any_way_needs(lengths, T):
    found = row_table(stream_of(lengths), T, "best_fit").rows
    fewest = fewest_rows(lengths, T)
    assert fewest <= found <= 11 / 9 * fewest + 6 / 9  # Dosa 2007, for first-fit-decreasing; of best fit Johnson 1974


@pytest.mark.parametrize("T", [128, 1024])
def test_best_fit_of_a_corpus_wastes_next_to_nothing_and_pad_much(T):
    targets = np.clip(np.random.default_rng(1).lognormal(6, 1, 20_000).astype(int), 1, None).tolist()
    stream = stream_of(targets)
    packed, padded = (row_table(stream, T, packing) for packing in ("best_fit", "pad"))
    bound = -(-sum(targets) // T)
    assert bound <= packed.rows <= 1.001 * bound + 1
    assert padded.rows > 1.05 * packed.rows
    assert packed.cut == padded.cut == sum(length > T for length in targets)


@given(targets=DOCUMENTS, T=st.integers(1, 45))
def test_best_fit_never_needs_more_rows_than_pad(targets, T):
    stream = stream_of(targets)
    assert row_table(stream, T, "best_fit").rows <= row_table(stream, T, "pad").rows


def test_moves_do_not_grow_with_the_pieces():
    T = 512
    counts = np.zeros(T + 1, dtype=np.int64)
    counts[1:] = np.random.default_rng(2).integers(1, 10**6, T)
    moves = list(best_fit(counts))
    assert len(moves) < T * math.log2(T)
    placed = np.zeros_like(counts)
    for move in moves:
        placed[move.length] += move.rows * move.each
    assert placed.tolist() == counts.tolist()


@given(
    targets=DOCUMENTS,
    T=st.integers(1, 20),
    packing=st.sampled_from(["concat", "document", *MODES]),
    order=st.sampled_from(["shuffle", "sequential"]),
    world_size=st.integers(1, 3),
    epoch=st.integers(0, 2),
)
def test_an_epoch_holds_the_streams_targets_once_in_all_modes(targets, T, packing, order, world_size, epoch):
    stream, count = stream_of(targets), sum(targets)
    if count < T and packing not in MODES:
        return
    loader = Loader(stream, DataConfig(seq_len=T, order=order, packing=packing, seed=5), EOT)
    k, first = loader.rows_per_epoch, epoch * loader.rows_per_epoch
    borders = np.linspace(first, first + k, world_size + 1).astype(int).tolist()  # a slice for each rank
    batches = [loader.batch(start, stop - start) for start, stop in itertools.pairwise(borders) if stop > start]
    found = sorted(target for batch in batches for target in batch.targets.flatten().tolist() if target != IGNORED)
    assert sum(batch.valid for batch in batches) == len(found) == len(set(found))
    left_out = 0 if packing in MODES else count % T
    assert len(found) == count - left_out
    assert set(found) <= set(range(1, count + 1))
    for batch in batches:
        counted = batch.targets != IGNORED
        assert (batch.targets - batch.inputs == 1)[counted].all()
        assert (batch.inputs == EOT)[~counted].all()


@given(targets=DOCUMENTS, T=st.integers(1, 20), packing=st.sampled_from(MODES), row=st.integers(0, 200))
def test_documents_and_positions_are_those_of_the_pieces(targets, T, packing, row):
    loader = Loader(stream_of(targets), DataConfig(seq_len=T, packing=packing), EOT)
    batch = loader.batch(row, 1)
    documents, positions = [], []
    for number, (_, length) in enumerate(loader.table.pieces(int(loader.table_rows(row, 1)[0])), start=1):
        documents += [number] * length
        positions += range(length)
    padding = T - len(documents)
    assert batch.documents.tolist() == [documents + [documents[-1] + 1] * padding]
    assert batch.positions.tolist() == [[*positions, *range(padding)]]


def test_a_documents_last_target_is_the_eot_that_follows_and_a_cut_loses_none():
    ids = np.array([9, 1, 2, 3, 4, 9, 5, 9, 9])  # documents of five, two and one targets
    stream = TokenStream([ids], np.array([0, 5, 7], dtype=np.uint64))
    rows = row_table(stream, 3, "best_fit").read(stream, np.arange(3), eot=9)
    assert rows.inputs.tolist() == [[9, 1, 2], [3, 4, 9], [9, 5, 9]]
    assert rows.targets.tolist() == [[1, 2, 3], [4, 9, IGNORED], [5, 9, 9]]
    assert rows.documents.tolist() == [[1, 1, 1], [1, 1, 2], [1, 1, 2]]
    assert rows.positions.tolist() == [[0, 1, 2], [0, 1, 0], [0, 1, 0]]
    padded = row_table(stream, 4, "pad").read(stream, np.arange(4), eot=9)
    assert padded.targets.tolist() == [[1, 2, 3, 4], [9, *[IGNORED] * 3], [5, 9, *[IGNORED] * 2], [9, *[IGNORED] * 3]]
    assert padded.inputs.tolist() == [[9, 1, 2, 3], [4, 9, 9, 9], [9, 5, 9, 9], [9, 9, 9, 9]]


@given(targets=DOCUMENTS, T=st.integers(1, 20), packing=st.sampled_from(MODES), limit=st.integers(1, 500))
def test_the_rows_of_a_part_hold_its_first_targets(targets, T, packing, limit):
    table = row_table(stream_of(targets), T, packing, limit)
    found = sorted(first + at + 1 for row in range(table.rows) for first, n in table.pieces(row) for at in range(n))
    assert found == list(range(1, min(limit, sum(targets)) + 1))


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_orders_work_over_rows(order):
    loader = Loader(stream_of([7] * 50), DataConfig(seq_len=16, order=order, packing="best_fit"), EOT)
    k = loader.rows_per_epoch
    assert k == 25
    epochs = [loader.table_rows(epoch * k, k).tolist() for epoch in range(2)]
    if order == "sequential":
        assert epochs == [list(range(k))] * 2
    else:
        assert epochs[0] != epochs[1]
        assert {len(set(epoch)) == k for epoch in epochs} == {order == "shuffle"}
    assert set(epochs[0] + epochs[1]) <= set(range(k))


def test_golden_rows_of_best_fit_in_their_order():
    """What a run reads is decided by these; another way to pack would be another run."""
    stream = stream_of([3, 30, 5, 1, 9, 9, 2, 16, 7, 4, 4, 11, 1])
    table = row_table(stream, 16, "best_fit")
    assert [table.pieces(row) for row in range(table.rows)] == [
        [(0, 3), (39, 9), (82, 4)],
        [(3, 16)],
        [(19, 14), (57, 2)],
        [(33, 5), (90, 11)],
        [(38, 1), (86, 4), (101, 1)],
        [(48, 9), (75, 7)],
        [(59, 16)],
    ]
    loader = Loader(stream, DataConfig(seq_len=16, packing="best_fit", seed=1337), EOT)
    assert loader.table_rows(0, 14).tolist() == [6, 5, 3, 2, 0, 1, 4, 5, 2, 1, 6, 4, 0, 3]


def test_equal_indices_share_one_table_and_others_do_not():
    one = row_table(stream_of([3, 4, 5]), 8, "best_fit")
    assert row_table(stream_of([3, 4, 5]), 8, "best_fit") is one
    others = [([3, 5, 4], 8, "best_fit"), ([3, 4, 5], 9, "best_fit"), ([3, 4, 5], 8, "pad"), ([3, 4, 6], 8, "best_fit")]
    assert all(row_table(stream_of(targets), T, packing) is not one for targets, T, packing in others)


def test_the_hash_of_a_batch_is_of_what_stands_in_it():
    stream = stream_of([3, 4, 5, 6, 7] * 5)
    hashes = [Loader(stream, DataConfig(seq_len=8, packing=p), EOT).hash_of(2, 3) for p in ("concat", *MODES)]
    assert len(set(hashes)) == 3
    assert Loader(stream, DataConfig(seq_len=8, packing="best_fit"), EOT).hash_of(2, 3) == hashes[2]
    assert Loader(stream, DataConfig(seq_len=8, packing="best_fit"), EOT).hash_of(3, 3) != hashes[2]


# Which streams know their documents

PEERS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14]] * 4


@pytest.fixture(params=["after", "before", "by index"])
def adopted(request: pytest.FixtureRequest, tmp_path: Path) -> TokenStore:
    for split in ("train", "val"):
        if request.param == "after":
            peers.raw(tmp_path / "peer" / f"{split}.bin", peers.flat([*document, 256] for document in PEERS))
        elif request.param == "before":
            peers.llmc(tmp_path / "peer" / f"x_{split}_000.bin", peers.flat([256, *document] for document in PEERS))
        else:
            peers.megatron(tmp_path / "peer" / f"x_{split}", PEERS)
    adopt(str(tmp_path / "peer"), tmp_path / "store", AdoptConfig(tokenizer="bytes"))
    return TokenStore(tmp_path / "store")


@pytest.mark.parametrize("packing", MODES)
def test_adopted_stores_pack_their_documents_wherever_eot_stands(adopted, packing):
    loader = Loader(adopted.train, DataConfig(seq_len=5, packing=packing), adopted.eot)
    assert (loader.table.documents, loader.table.cut) == (20, 4)
    batch = loader.batch(0, loader.rows_per_epoch)
    expected = Counter(peers.stream(PEERS, 256)[1:])
    assert Counter(batch.targets[batch.targets != IGNORED].tolist()) == expected


def test_a_store_without_any_eot_knows_no_documents_and_is_refused_by_name(tmp_path):
    for split in ("train", "val"):
        peers.raw(tmp_path / "peer" / f"{split}.bin", list(range(1, 200)))
    adopt(str(tmp_path / "peer"), tmp_path / "store", AdoptConfig(tokenizer="bytes"))
    store = TokenStore(tmp_path / "store")
    with pytest.raises(
        DataError, match=r"store \(train\): its files hold no eot.*packing best_fit needs that"
    ) as raised:
        Loader(store.train, DataConfig(seq_len=8, packing="best_fit"), store.eot)
    assert raised.value.exit_code == 2
    assert Loader(store.train, DataConfig(seq_len=8), store.eot).rows_per_epoch == 25


@pytest.mark.parametrize("starts", [[0, 5, 5], [0, 7, 3], [0, 5, 40], [1, 5]])
def test_an_index_that_is_none_is_named(starts):
    stream = TokenStream([np.arange(17)], np.array(starts, dtype=np.uint64), "store (train)")
    with pytest.raises(DataError, match=r"store \(train\): the index does not ascend from 0"):
        row_table(stream, 4, "pad")


@pytest.mark.parametrize("stream", [TokenStream([], np.empty(0, np.uint64)), stream_of([])])
def test_a_split_without_documents_has_no_rows(stream):
    with pytest.raises(DataError, match="holds no document"):
        row_table(stream, 4, "best_fit")
