"""Counting through posting lists is counting."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.text import postings
from quatrain.text.postings import PostingLists

HOLDERS = st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=12)


def counted(holders: list[set[int]], documents: list[set[int]], below: list[int]) -> dict:
    pairs = [(gram, holder) for gram, some in enumerate(holders) for holder in some]
    lists = PostingLists(*np.array(pairs, dtype=np.int64).T, documents=6)
    held = np.array([(number, gram) for number, some in enumerate(documents) for gram in sorted(some)], dtype=np.int64)
    numbers, grams = held.reshape(-1, 2).T
    found = [
        zip(*map(np.ndarray.tolist, part), strict=True)
        for part in lists.counted(numbers, grams, np.array(below, dtype=np.int64))
    ]
    flattened = [item for part in found for item in part]
    result = {(number, holder): count for number, holder, count in flattened}
    assert len(result) == len(flattened)  # no document is cut in two
    return result


@given(holders=HOLDERS, data=st.data(), expanded=st.integers(1, 20))
def test_counts_in_parts_are_counts(holders, data, expanded):
    documents = data.draw(st.lists(st.sets(st.integers(0, len(holders) - 1)), max_size=6))
    below = data.draw(st.lists(st.integers(0, 6), min_size=len(documents), max_size=len(documents)))
    expected = Counter(
        (number, holder)
        for number, some in enumerate(documents)
        for gram in some
        for holder in holders[gram]
        if holder < below[number]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postings, "EXPANDED", expanded)
        assert counted(holders, documents, below) == expected


def test_grams_of_the_same_holders_share_a_list():
    everyone = np.arange(1000)
    grams, holders = np.repeat(np.arange(500), 1000), np.tile(everyone, 500)
    lists = PostingLists(grams, holders, 1000)
    assert len(lists._starts) == 1000 + 1
