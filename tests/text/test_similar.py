"""Every document that is similar to validation is found, and no other, as plain Python sets would have it."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import edited, flat, grams, jaccard, planted, prose, similar_pairs

from quatrain.text import postings, similar
from quatrain.text.similar import ValidationIndex

Pairs = dict[tuple[int, int], float]


def found(index: ValidationIndex, documents: list[list[int]], dtype: type = np.uint16) -> Pairs:
    numbers, others, jaccards = index.similar(*flat(documents, dtype))
    assert (numbers.dtype, others.dtype, jaccards.dtype) == (np.int64, np.int64, np.float64)
    pairs = list(zip(numbers.tolist(), others.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    return dict(zip(pairs, jaccards.tolist(), strict=True))


def expected(documents: list[list[int]], validation: list[list[int]], threshold: float) -> Pairs:
    mine, theirs = list(map(grams, documents)), list(map(grams, validation))
    pairs = {(one, two): jaccard(a, b) for one, a in enumerate(mine) for two, b in enumerate(theirs)}
    return {pair: value for pair, value in pairs.items() if value >= threshold}


# Few ids, so that by chance much is alike; runs of one id, so that much is repeated.
SOME = st.lists(st.one_of(st.integers(0, 2).map(lambda one: [one]), st.integers(3, 5).map(lambda one: [one] * 8)))
TEXTS = st.lists(SOME.map(lambda parts: [one for part in parts for one in part]), min_size=1, max_size=6)


@given(texts=TEXTS, data=st.data(), threshold=st.sampled_from([0.05, 0.25, 0.5, 0.6, 2 / 3, 0.75, 0.9, 1.0]))
def test_the_pairs_of_sets_are_found(texts, data, threshold):
    edits = st.tuples(st.sampled_from(texts), st.integers(0, 30), st.integers(0, 5), st.integers(0, 3))
    copies = [
        text[:place] + [new] * count + text[place + 1 :] for text, place, new, count in data.draw(st.lists(edits))
    ]
    documents, validation = texts + copies, copies[::2] + texts[::2]
    index = ValidationIndex(*flat(validation), threshold)
    assert found(index, documents) == expected(documents, validation, threshold)
    assert found(index, documents, np.uint32) == found(index, documents)
    numbers, others, jaccards = (column.tolist() for column in index.similar(*flat(documents), most=1))
    assert numbers == sorted({number for number, _ in found(index, documents)})
    assert set(zip(zip(numbers, others, strict=True), jaccards, strict=True)) <= found(index, documents).items()
    assert found(ValidationIndex(*flat(validation, np.uint32), threshold), documents) == found(index, documents)
    behind = index.similar(*flat([[9, *document] for document in documents]), behind=1)
    assert [column.tolist() for column in behind] == [column.tolist() for column in index.similar(*flat(documents))]


def test_what_is_repeated_counts_once():
    text = prose(random.Random(0), 300)
    spam = text + [7] * 10_000
    index = ValidationIndex(*flat([text]))
    pairs = found(index, [spam, [*text, 7], [7] * 10_000])
    assert pairs == {(0, 0): jaccard(grams(text), grams(spam)), (1, 0): jaccard(grams(text), grams([*text, 7]))}
    assert pairs[0, 0] > 0.98
    assert found(ValidationIndex(*flat([spam])), [text]) == {(0, 0): pairs[0, 0]}


def test_ids_beyond_sixteen_bits():
    text = [number * 65_536 + 5 for number in range(60)]
    low = [5] * 60
    index = ValidationIndex(*flat([text], np.uint32))
    assert found(index, [low, text], np.uint32) == {(1, 0): 1.0}


def test_the_threshold_itself_is_similar():
    # 20 grams; every edited end of k ids leaves 20 - k in common and makes k new: (20 - k) / (20 + k).
    text = list(range(24))
    for changed in range(21):
        similarity = (20 - changed) / (20 + changed)
        copy = text[: 24 - changed] + [100 + place for place in range(changed)]
        if similarity:
            index = ValidationIndex(*flat([text]), similarity)
            assert found(index, [copy]) == {(0, 0): similarity}
        if similarity < 1:
            assert not found(ValidationIndex(*flat([text]), similarity + 1e-9), [copy])


@pytest.mark.parametrize("documents", [[], [[]], [[], [1, 2, 3, 4], []]])
def test_nothing_is_near_nothing(documents):
    text = list(range(50))
    assert found(ValidationIndex(*flat(documents)), [text, *documents]) == {}
    assert found(ValidationIndex(*flat([text, *documents])), documents) == {}


@pytest.mark.parametrize("threshold", [0, -0.1, 1.01])
def test_a_threshold_that_means_nothing_is_refused(threshold):
    with pytest.raises(ValueError, match="expected above 0 and at most 1"):
        ValidationIndex(*flat([[1, 2, 3]]), threshold)


def boilerplate(count: int) -> list[list[int]]:
    """Documents that share most of what they say."""
    rng = random.Random(1)
    common = prose(rng, 130)
    return [common[: rng.randint(90, 130)] + prose(rng, 40) for _ in range(count)]


def test_a_validation_set_of_boilerplate(monkeypatch):
    documents, validation = boilerplate(60), boilerplate(80)[60:]
    index = ValidationIndex(*flat(validation))
    pairs = found(index, documents)
    assert pairs == expected(documents, validation, 0.6)
    assert 0 < len(pairs) < 60 * 20
    monkeypatch.setattr(postings, "EXPANDED", 7)
    assert found(index, documents) == pairs


def test_blocks_leave_no_seam(monkeypatch):
    documents, pairs = planted(2, 60, 30, (20, 90))
    whole = found(ValidationIndex(*flat(documents)), documents)
    assert {(later, earlier) for earlier, later in pairs} & set(whole)
    monkeypatch.setattr(similar, "BLOCK", 13)
    assert found(ValidationIndex(*flat(documents)), documents) == whole == expected(documents, documents, 0.6)


def test_threads_share_one_index():
    documents, _ = planted(3, 400, 200, (50, 200))
    index = ValidationIndex(*flat(documents[:100]))
    batches = [documents[start : start + 100] for start in range(0, 400, 100)] * 4
    alone = [found(index, batch) for batch in batches]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda batch: found(index, batch), batches)) == alone
    assert sum(map(len, alone)) > 400


def test_no_planted_edit_of_validation_is_left():
    rng = random.Random(4)
    documents = [prose(rng, rng.randint(20, 100)) for _ in range(18_000)]
    validation = documents[::180]
    train = [one for place, one in enumerate(documents) if place % 180]
    for _ in range(2000):
        train.insert(rng.randrange(len(train)), edited(rng, rng.choice(validation), rng.uniform(0.4, 1)))
    exhaustive = similar_pairs(train, validation, 0.6)
    assert len(exhaustive) > 1000
    assert found(ValidationIndex(*flat(validation)), train) == exhaustive
