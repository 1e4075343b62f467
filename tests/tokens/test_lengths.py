"""Lengths are what a plain loop over the documents finds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peers
from quatrain.errors import DataError
from quatrain.interop.adoption import adopt
from quatrain.interop.config import AdoptConfig
from quatrain.tokens import lengths as lengths_module
from quatrain.tokens.lengths import BINS, Lengths, PaddedRows, bin_edges, document_lengths
from quatrain.tokens.packing import IGNORED, padding_waste
from quatrain.tokens.rows import row_table
from quatrain.tokens.store import TokenStore, TokenStream

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=40)


class FakeStore:
    """A split of documents of given lengths, as far as its index tells."""

    folder = "store"

    def __init__(self, lengths: list[int]) -> None:
        ends = np.cumsum([0, *(length + 1 for length in lengths)])
        self.starts = ends[:-1].astype(np.uint64)
        self.ids = int(ends[-1]) + 1

    def document_starts(self, name):
        return self.starts

    def split(self, name):
        return range(self.ids)


def lengths_of(numbers: list[int]) -> Lengths:
    return document_lengths(FakeStore(numbers), "train")


@given(numbers=LENGTHS, chunk=st.integers(1, 5))
def test_lengths_are_counted_from_the_index_in_chunks(numbers, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_module, "CHUNK", chunk)
        found = lengths_of(numbers)
    assert np.repeat(found.values, found.documents).tolist() == sorted(numbers)
    assert (found.total, found.ids) == (len(numbers), sum(numbers))
    assert (np.diff(found.values) > 0).all()


@pytest.mark.parametrize("style", ["before", "after", "by index"])
def test_lengths_of_adopted_documents_are_their_own_wherever_eot_stands(tmp_path, style):
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12, 13]]
    for split in ("train", "val"):
        if style == "by index":
            peers.megatron(tmp_path / "peer" / f"x_{split}", documents)
        elif style == "after":
            peers.raw(tmp_path / "peer" / f"{split}.bin", peers.flat([*document, 256] for document in documents))
        else:
            peers.raw(tmp_path / "peer" / f"{split}.bin", peers.flat([256, *document] for document in documents))
    adopt(str(tmp_path / "peer"), tmp_path / "store", AdoptConfig(tokenizer="bytes"))
    found = document_lengths(TokenStore(tmp_path / "store"), "train")
    assert np.repeat(found.values, found.documents).tolist() == [1, 3, 3, 6]


@given(numbers=LENGTHS, T=st.integers(1, 20))
def test_packing_by_length_is_what_the_rows_of_documents_hold(numbers, T):
    store = FakeStore(numbers)
    table = row_table(TokenStream([np.zeros(store.ids, np.uint16)], store.starts), T, "best_fit")
    assert lengths_of(numbers).packed(T) == (table.rows, table.padding, table.cut)


@given(numbers=LENGTHS, share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_quantiles_are_lengths_of_documents(numbers, share):
    found = lengths_of(numbers).quantile(share)
    assert found == np.quantile(numbers, share, method="inverted_cdf")
    assert sum(number <= found for number in numbers) >= share * len(numbers)


@given(numbers=LENGTHS)
def test_a_histogram_holds_every_document_once(numbers):
    edges = bin_edges(min(numbers), max(numbers))
    found = lengths_of(numbers).histogram(edges)
    assert found.sum() == len(numbers)
    for first, behind, documents in zip(edges[:-1], edges[1:], found, strict=True):
        assert documents == sum(first <= number < behind for number in numbers)


@given(shortest=st.integers(0, 10**10), more=st.integers(0, 10**10))
def test_edges_hold_both_ends_and_nothing_beyond(shortest, more):
    edges = bin_edges(shortest, shortest + more)
    assert (np.diff(edges) > 0).all()
    assert edges[0] <= shortest < edges[1]
    assert edges[-2] <= shortest + more < edges[-1]
    assert len(edges) - 1 <= max(BINS, (shortest + more).bit_length() + 1)


@given(numbers=LENGTHS, T=st.integers(1, 20))
def test_padding_by_formula_is_padding_waste_and_what_filled_rows_hold(numbers, T):
    rows = []
    for number in numbers:
        targets = list(range(number + 1))  # its ids and the eot that follows
        while targets:
            row, targets = targets[:T], targets[T:]
            rows.append(row + [IGNORED] * (T - len(row)))
    wasted = sum(row.count(IGNORED) for row in rows)
    assert lengths_of(numbers).padded(T) == (len(rows), wasted)
    assert padding_waste([number + 1 for number in numbers], T) == (len(rows), wasted)


@given(numbers=LENGTHS, T=st.integers(1, 20), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_padding_measured_in_the_ids_is_that_of_the_formula_however_they_come(numbers, T, cuts):
    stream = np.array([9] + [token for number in numbers for token in [*range(number), 9]]) % 10
    stream[stream == 9] = 8
    stream[np.cumsum([0, *(number + 1 for number in numbers)])] = 9
    padded = PaddedRows(T, eot=9)
    for ids in np.split(stream, sorted(cut for cut in cuts if cut <= len(stream))):
        padded.read(ids)
    assert padded.documents == len(numbers)
    assert (padded.rows, padded.wasted) == lengths_of(numbers).padded(T)


def test_after_a_jump_the_document_under_way_is_left_out():
    padded = PaddedRows(4, eot=9)
    padded.read(np.array([9, 1, 9, 1]))
    padded.jump()
    padded.read(np.array([1, 1, 9, 1, 1, 9]))
    assert (padded.documents, padded.rows, padded.wasted) == (2, 2, (4 - 2) + (4 - 3))


def test_without_documents_there_is_nothing():
    found = lengths_of([])
    assert (found.total, found.ids, found.quantile(0.5), found.padded(8)) == (0, 0, 0, (0, 0))
    assert found.packed(8) == (0, 0, 0)


def test_the_distinct_lengths_of_a_large_split_are_few():
    numbers = np.random.default_rng(0).integers(0, 10**6, size=5000).tolist()
    found = lengths_of(numbers)
    assert len(found.values) <= math.isqrt(2 * sum(numbers)) + 1


@pytest.mark.parametrize("starts", [[0, 5, 5], [0, 7, 3], [0, 5, 40]])
def test_an_index_that_does_not_ascend_is_named(starts):
    store = FakeStore([4, 4, 4])
    store.starts = np.array(starts, dtype=np.uint64)
    with pytest.raises(DataError, match=r"the index of val does not ascend within the split's 16 ids; .* --verify"):
        document_lengths(store, "val")
