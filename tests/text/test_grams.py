"""A gram has one hash wherever it stands, and none crosses a border."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import flat, grams

from quatrain.text import grams as module
from quatrain.text.grams import gram_hashes, gram_hashes_at, gram_set, grams_within, jaccard

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.integers(0, 20))
def test_equal_grams_alone_have_equal_hashes(ids, repeated):
    ids = np.array(ids + ids[:repeated], dtype=np.uint32)
    hashes = gram_hashes(ids)
    windows = [tuple(ids[place : place + 5].tolist()) for place in range(len(hashes))]
    assert len(hashes) == max(0, len(ids) - 4)
    assert len(set(hashes.tolist())) == len(set(windows)) == len(set(zip(windows, hashes.tolist(), strict=True)))


@given(st.lists(st.integers(0, 2**16 - 1), min_size=5, max_size=300), st.data())
def test_the_width_of_the_ids_and_the_way_make_no_difference(ids, data):
    hashes = gram_hashes(np.array(ids, dtype=np.uint16))
    wide = np.array(ids, dtype=np.uint32)
    places = np.array(data.draw(st.lists(st.integers(0, len(ids) - 5))), dtype=np.int64)
    assert np.array_equal(hashes, gram_hashes(wide))
    assert np.array_equal(hashes[places], gram_hashes_at(wide, places))


def test_blocks_leave_no_seam(monkeypatch):
    ids = np.random.default_rng(0).integers(0, 50_000, 1000).astype(np.uint16)
    whole = gram_hashes(ids)
    monkeypatch.setattr(module, "BLOCK", 7)
    assert np.array_equal(gram_hashes(ids), whole)


def test_the_hashes_never_change_between_versions():
    golden = [14631762866706283307, 6965411134353423694]
    assert gram_hashes(np.array([1, 2, 3, 4, 5, 50_256], dtype=np.uint16)).tolist() == golden


@given(DOCUMENTS)
def test_only_grams_within_a_document_count(documents):
    ids, offsets = flat(documents)
    hashes, bounds = grams_within(ids, offsets)
    assert len(bounds) == len(documents) + 1
    for number, document in enumerate(documents):
        alone = gram_hashes(np.array(document, dtype=np.uint16))
        assert np.array_equal(hashes[bounds[number] : bounds[number + 1]], alone)


@given(DOCUMENTS, st.integers(0, 8), st.integers(0, 8))
def test_part_of_a_batch_is_enough(documents, start, count):
    ids, offsets = flat(documents)
    part = offsets[min(start, len(documents)) :][: count + 1]
    hashes, bounds = grams_within(ids, part)
    expected, expected_bounds = grams_within(ids[part[0] : part[-1]], part - part[0])
    assert np.array_equal(hashes, expected)
    assert np.array_equal(bounds, expected_bounds)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_similarity_is_that_of_sets(one, other):
    mine, theirs = grams(one), grams(other)
    sets = [gram_set(np.array(document, dtype=np.uint16)) for document in (one, other)]
    assert len(sets[0]) == len(mine)
    assert jaccard(*sets) == (len(mine & theirs) / len(mine | theirs) if mine and theirs else 0)


@pytest.mark.parametrize("bit", range(0, 64, 9))
def test_hashes_are_well_mixed(bit):
    # Neighbouring ids, as numbers in a table have them: every bit is one in about half of the hashes.
    ids = np.arange(40_000, dtype=np.uint16)
    ones = ((gram_hashes(ids) >> np.uint64(bit)) & np.uint64(1)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / 200
