"""What is removed is similar to something kept, and nothing that is kept repeats what is kept before it."""

import random
from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import edited, flat, grams, jaccard, planted, prose, similar_pairs

from quatrain.text import near
from quatrain.text.near import BANDS, NOTHING, Similarity, band_hashes, candidate_pairs, near_duplicates, repeats


def ids_of(documents):
    return lambda number: np.array(documents[number], dtype=np.uint16)


def bands_of(documents):
    bands = band_hashes(*flat(documents))
    return lambda band: bands[:, band]


def shared_bands(bands: np.ndarray, among: np.ndarray) -> set[tuple[int, int]]:
    """Every pair that is in a bucket together, by plain dictionaries."""
    pairs = set()
    for column in bands.T.tolist():
        buckets = defaultdict(list)
        for number, value in enumerate(column):
            if value != NOTHING and among[number]:
                buckets[value].append(number)
        pairs.update(pair for bucket in buckets.values() for pair in combinations(bucket, 2))
    return pairs


def greedy(documents: int, similar: set[tuple[int, int]]) -> np.ndarray:
    """Which documents are similar to an earlier one that is kept."""
    removed = np.zeros(documents, dtype=np.bool_)
    for earlier, later in sorted(similar, key=lambda pair: pair[::-1]):
        removed[later] |= not removed[earlier]
    return removed


def test_band_hashes_depend_on_the_set_alone():
    text = prose(random.Random(0), 200)
    twice = [*text, *text[:4], *text]  # the grams of text, and four at the seam
    alone = band_hashes(*flat([text]))
    batch = band_hashes(*flat([[], text, [1, 2, 3, 4], text, twice]))
    assert (batch.shape, batch.dtype) == ((5, BANDS), np.uint32)
    assert np.array_equal(batch[1], alone[0])
    assert np.array_equal(batch[3], alone[0])
    assert (batch[4] == batch[1]).mean() > 0.8
    assert np.array_equal(band_hashes(*flat([text], np.uint32)), alone)


def test_a_document_without_grams_matches_nothing():
    documents = [[], [], [1, 2, 3, 4], [1, 2, 3, 4], [5], list(range(9)), list(range(9))]
    bands = band_hashes(*flat(documents))
    assert (bands[:5] == NOTHING).all()
    assert (bands[5:] != NOTHING).all()
    assert near_duplicates(bands_of(documents), ids_of(documents), 7).like.tolist() == [-1, -1, -1, -1, -1, -1, 5]


def test_parts_of_a_batch_leave_no_seam(monkeypatch):
    documents = [prose(random.Random(place), 30) for place in range(20)]
    whole = band_hashes(*flat(documents))
    monkeypatch.setattr(near, "PART", 3)
    assert np.array_equal(band_hashes(*flat(documents)), whole)


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.8])
def test_bands_are_shared_as_often_as_theory_says(similarity):
    """1 - (1 - J^4)^64, within five standard deviations: the places of a signature are as good as independent."""
    rng, size, count = np.random.default_rng(1), 200, 1000
    common = round(2 * size * similarity / (1 + similarity))
    ids = [rng.integers(0, 60_000, 2 * size - common + 4).astype(np.uint16) for _ in range(count)]
    documents = [part for one in ids for part in (one[: size + 4], one[size - common :])]  # size grams each
    bands = band_hashes(np.concatenate(documents), np.cumsum([0, *map(len, documents)]))
    shared = (bands[0::2] == bands[1::2]).sum(axis=1)
    expected = (common / (2 * size - common)) ** 4
    assert abs(shared.mean() / BANDS - expected) < 5 * np.sqrt(expected * (1 - expected) / (count * BANDS))
    missed = (1 - expected) ** BANDS
    assert abs((shared == 0).mean() - missed) < 5 * np.sqrt(missed * (1 - missed) / count) + 1 / count


BUCKETS = st.integers(2, 40).flatmap(
    lambda count: st.lists(st.lists(st.integers(0, 3), min_size=count, max_size=count), min_size=1, max_size=4)
)


@given(BUCKETS, st.integers(1, 50), st.data())
def test_pairs_of_small_buckets_are_complete(columns, width, data):
    bands = np.array((columns * BANDS)[:BANDS], dtype=np.uint32).T
    count = len(bands)
    among = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    pairs, complete = candidate_pairs(lambda band: bands[:, band], among, width)
    every = shared_bands(bands, among)
    found = list(map(tuple, pairs.tolist()))
    assert found == sorted(set(found))
    assert set(found) <= every
    if complete:
        assert set(found) == every
    assert complete or any(np.bincount(column[among])[1:].max(initial=0) > width + 1 for column in bands.T)


def test_equal_documents_give_few_pairs_and_one_comparison_each(monkeypatch):
    text, count = prose(random.Random(0), 50), 3000
    ids, offsets = flat([text] * count)
    bands = band_hashes(ids, offsets)
    pairs, complete = candidate_pairs(lambda band: bands[:, band])
    assert not complete
    assert len(pairs) <= 2 * near.WIDTH * count
    compared = []
    original = Similarity.__call__
    monkeypatch.setattr(
        Similarity, "__call__", lambda self, *pair: compared.append(pair) or original(self, *pair), raising=True
    )
    result = near_duplicates(
        lambda band: bands[:, band], lambda number: ids[offsets[number] : offsets[number + 1]], count
    )
    assert result.like.tolist() == [-1] + [0] * (count - 1)
    assert len(compared) == count - 1


# The similarity is made up, so that buckets hold every mixture of similar and other documents.
@given(columns=BUCKETS, seed=st.integers(0, 2**32), share=st.sampled_from([0.05, 0.3, 0.7]), width=st.integers(1, 3))
def test_the_result_is_that_of_all_pairs_that_share_a_band(columns, seed, share, width):
    bands = np.array((columns * BANDS)[:BANDS], dtype=np.uint32).T
    count = len(bands)
    rng = random.Random(seed)
    alike = {pair for pair in combinations(range(count), 2) if rng.random() < share}
    every = shared_bands(bands, np.ones(count, dtype=np.bool_))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near, "WIDTH", width)
        patch.setattr(Similarity, "__call__", lambda _, one, other: float((one, other) in alike))
        result = near_duplicates(lambda band: bands[:, band], ids_of([]), count)
    assert np.array_equal(result.removed, greedy(count, alike & every))
    for later in np.flatnonzero(result.removed).tolist():
        earlier = int(result.like[later])
        assert (earlier, later) in alike
        assert not result.removed[earlier]


def test_similarities_that_are_known_are_not_measured():
    pairs = np.array([[0, 1], [1, 2], [0, 3]])
    jaccards = np.array([0.7, np.nan, 0.0])

    def never(one, other):
        raise AssertionError((one, other))

    result = repeats(pairs, jaccards, never, 4)  # 1 is removed, so that it does not matter whether 2 is like it
    assert (result.like.tolist(), result.jaccards.tolist()) == ([-1, 0, -1, -1], [0, 0.7, 0, 0])


def test_the_similarity_is_exact_or_zero(monkeypatch):
    rng = random.Random(3)
    text = prose(rng, 100)
    documents = [text, *(edited(rng, text, place / 20) for place in range(20)), text[:40], [], [], text + [7] * 5000]
    for cached in (0, near.CACHED):
        monkeypatch.setattr(near, "CACHED", cached)
        similarity = Similarity(ids_of(documents), 0.6)
        for one, other in combinations(range(len(documents)), 2):
            exact = jaccard(grams(documents[one]), grams(documents[other]))
            assert similarity(one, other) == (exact if exact >= 0.6 else 0)


@pytest.mark.parametrize("count", [0, 1])
def test_few_documents(count):
    documents = [list(range(9))] * count
    result = near_duplicates(bands_of(documents), ids_of(documents), count)
    assert result.removed.tolist() == [False] * count


def planted_edits_are_removed(count: int, copies: int, lengths: tuple[int, int]) -> None:
    documents, _ = planted(5, count, copies, lengths)
    similar = {(one, other) for one, other in similar_pairs(documents, documents, 0.6) if one < other}
    result = near_duplicates(bands_of(documents), ids_of(documents), count)
    expected = greedy(count, similar)
    assert expected.sum() > 0.6 * copies
    for later in np.flatnonzero(result.removed).tolist():  # precision 1
        assert (result.like[later], later) in similar
        assert not result.removed[result.like[later]]
    recall = (result.removed & expected).sum() / expected.sum()
    assert recall >= 0.99
    left = [pair for pair in similar if not result.removed[list(pair)].any()]
    assert len(left) <= 0.01 * len(similar)


def test_planted_edits_are_removed():
    planted_edits_are_removed(20_000, 2000, (12, 40))


@pytest.mark.soak
def test_planted_edits_are_removed_at_length():
    planted_edits_are_removed(20_000, 2000, (20, 600))
