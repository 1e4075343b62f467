"""What is looked up is found, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.text.lookup import BitMap, Lookup, ascending, mixed, unpaired

HASHES = st.lists(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 8), st.integers(2**64 - 9, 2**64 - 1)))


@given(members=HASHES, wanted=HASHES)
def test_exactly_the_members_are_found(members, wanted):
    known = ascending(np.array(members, dtype=np.uint64))
    positions, which = Lookup(known).find(np.array(members + wanted, dtype=np.uint64))
    found = dict(zip(positions.tolist(), known[which].tolist(), strict=True))
    assert found == {place: value for place, value in enumerate(members + wanted) if value in set(members)}
    assert positions.tolist() == sorted(positions)


def test_many_hashes_that_differ_in_their_last_bits_alone():
    members = np.arange(0, 20_000, 2, dtype=np.uint64)
    positions, which = Lookup(members).find(np.arange(100, dtype=np.uint64))
    assert (positions.tolist(), which.tolist()) == (list(range(0, 100, 2)), list(range(50)))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_bit_map_lets_all_members_through_and_few_others(dtype):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, np.iinfo(dtype).max, 100_000, dtype=dtype)
    possible = BitMap(numbers[:1000]).possible(numbers.copy())
    assert np.array_equal(possible[:1000], np.arange(1000))
    assert len(possible) < 1000 + 0.02 * len(numbers)


def test_mixing_is_the_finalizer_of_splitmix64():
    # The first numbers of SplitMix64 from seed 1234567, as published with it: it mixes multiples of the constant.
    states = np.array([1234567], dtype=np.uint64) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mixed(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6))))
def test_pairs_come_back_from_keys(pairs):
    first, second = unpaired(np.array([one * 7 + two for one, two in pairs], dtype=np.int64), 7)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == pairs
