import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from quatrain.tokens.packing import IGNORED, document_ids, packed_mask, padding_waste, positions

ROWS = st.lists(st.integers(0, 3), min_size=1, max_size=14)  # 3 is eot: about every fourth id


def naive_mask(x: list[int], eot: int) -> tuple[list[list[bool]], list[int]]:
    allowed = [[False] * len(x) for _ in x]
    pos = []
    for i in range(len(x)):
        begin = max((j for j in range(i + 1) if x[j] == eot), default=0)
        pos.append(i - begin)
        for j in range(begin, i + 1):
            allowed[i][j] = True
    return allowed, pos


@given(x=ROWS, dtype=st.sampled_from([np.uint16, np.uint32, np.int64]))
def test_packed_mask_is_that_of_a_naive_double_loop(x, dtype):
    mask, pos = packed_mask(np.array(x, dtype=dtype), eot=3)
    assert mask.dtype == np.bool_
    assert np.issubdtype(pos.dtype, np.integer)
    assert (mask.tolist(), pos.tolist()) == naive_mask(x, eot=3)


@pytest.mark.parametrize(
    ("x", "pos"),
    [
        ([5, 6, 7], [0, 1, 2]),  # no document begins here
        ([9, 5, 6], [0, 1, 2]),
        ([5, 9, 6, 9], [0, 0, 1, 0]),  # begins mid-document
        ([9, 9, 9], [0, 0, 0]),  # empty documents
        ([9], [0]),
    ],
)
def test_positions_restart_where_a_document_begins(x, pos):
    mask, found = packed_mask(np.array(x), eot=9)
    assert found.tolist() == pos
    assert mask.sum(axis=1).tolist() == [p + 1 for p in pos]  # each position sees its document so far


@given(rows=st_numpy.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.integers(0, 3)))
def test_batches_of_rows_are_treated_row_by_row(rows):
    ids, pos = document_ids(rows, 3), positions(rows, 3)
    for row, documents, restarted in zip(rows, ids, pos, strict=True):
        mask, expected = packed_mask(row, 3)
        assert restarted.tolist() == expected.tolist()
        assert np.array_equal(mask, np.tril(documents[:, None] == documents[None, :]))


@given(lengths=st.lists(st.integers(0, 50), max_size=8), T=st.integers(1, 16))
def test_padding_waste_is_what_padded_rows_would_waste(lengths, T):
    rows = []
    for length in lengths:
        targets = list(range(length))
        while targets:
            row, targets = targets[:T], targets[T:]
            rows.append(row + [IGNORED] * (T - len(row)))
    assert padding_waste(lengths, T) == (len(rows), sum(row.count(IGNORED) for row in rows))


def test_padding_waste_reads_any_iterable_into_plain_ints():
    expected = (4, 4)
    for lengths in ([3, 4, 5], (n for n in (3, 4, 5)), np.array([3, 4, 5], dtype=np.uint16)):
        found = padding_waste(lengths, 4)
        assert found == expected
        assert all(type(number) is int for number in found)
