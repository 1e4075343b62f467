"""The stored share is that of validation's 32-token spans which stand word for word in train."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain import TokenStore, prepare
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.overlap import BYTES_PER_TOKEN, KEPT, SPAN, SpanSample, sampled_starts, span_hashes, thinning


def spans_of(documents: list[list[int]]) -> list[tuple[int, ...]]:
    """Every span that lies whole inside one document, as the ids themselves."""
    return [tuple(ids[i : i + SPAN]) for ids in documents for i in range(len(ids) - SPAN + 1)]


def spans_in(ids: np.ndarray, bits: int) -> np.ndarray:
    """The sampled spans of one document."""
    return span_hashes(ids, sampled_starts(ids, np.array([0, len(ids)]), bits))


def share_by_hand(train: list[list[int]], val: list[list[int]]) -> float:
    known, wanted = set(spans_of(train)), spans_of(val)
    return sum(span in known for span in wanted) / len(wanted) if wanted and known else 0.0


def share(train: list[list[int]], val: list[list[int]], bits: int = 0) -> float:
    sample = SpanSample(bits)
    for ids in val:
        sample.add(np.array(ids, dtype=np.uint32), np.array([0, len(ids)]))
    found = [sample.found_in(np.array(ids, dtype=np.uint32), np.array([0, len(ids)])) for ids in train]
    return sample.share(np.concatenate([sample.hashes[:0], *found]))


# Pieces of a few long phrases, so that spans do meet.
PHRASES = [np.random.default_rng(7).integers(0, 50_000, 60).tolist() for _ in range(3)] + [[0] * 50]
PIECES = st.tuples(st.sampled_from(PHRASES), st.integers(0, 30), st.integers(0, 60)).map(lambda p: p[0][p[1] : p[2]])
DOCUMENTS = st.lists(st.lists(PIECES, max_size=3).map(lambda pieces: list(chain(*pieces))), max_size=4)


@given(train=DOCUMENTS, val=DOCUMENTS)
def test_without_thinning_the_share_is_counted_exactly(train, val):
    assert share(train, val) == pytest.approx(share_by_hand(train, val))


def test_the_share_knows_all_none_half_and_nothing_to_compare():
    ids, other = np.random.default_rng(0).integers(0, 50_000, (2, 200)).tolist()
    assert share([ids], [ids]) == 1
    assert share([ids], [other]) == 0
    assert share([ids], [ids, other]) == 0.5
    assert share([ids], [ids[: SPAN - 1]]) == share([], [ids]) == share([ids], []) == 0


@pytest.mark.parametrize(("length", "count"), [(0, 0), (SPAN - 1, 0), (SPAN, 1), (SPAN + 4, 5)])
def test_spans_lie_whole_inside_a_document(length, count):
    assert len(spans_in(np.arange(length, dtype=np.uint32), 0)) == count


@given(
    start=st.integers(0, 300),
    before=st.lists(st.integers(0, 60_000), max_size=40),
    after=st.lists(st.integers(0, 60_000), max_size=40),
    bits=st.integers(0, 6),
)
def test_a_span_is_sampled_wherever_it_stands(start, before, after, bits):
    ids = np.random.default_rng(3).integers(0, 60_000, 600, dtype=np.uint32)[start : start + 200]
    inside = np.concatenate([np.array(before, np.uint32), ids, np.array(after, np.uint32)])
    assert set(spans_in(ids, bits).tolist()) <= set(spans_in(inside, bits).tolist())


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("vocab", [256, 50_257])
def test_thinning_keeps_its_share_of_spans_and_the_share_in_train(bits, vocab):
    draw = np.random.default_rng(bits)
    common, more = draw.integers(0, vocab, (2, 100_000)).tolist()
    kept = len(spans_in(np.array(common, dtype=np.uint32), bits))
    assert kept == pytest.approx(100_000 / 2**bits, rel=0.3)
    assert share([common], [common, more], bits) == pytest.approx(0.5, abs=0.1)


@given(corpus_bytes=st.integers(0, 10**14))
def test_a_corpus_of_any_size_keeps_about_as_many_spans(corpus_bytes):
    tokens, kept_one_in = corpus_bytes / BYTES_PER_TOKEN, 2 ** thinning(corpus_bytes)
    assert tokens / kept_one_in <= KEPT
    assert kept_one_in == 1 or tokens / kept_one_in >= KEPT / 2 - 1


def test_different_spans_have_different_hashes():
    draw = np.random.default_rng(1)
    random = draw.integers(0, 50_257, 100_000, dtype=np.uint32)
    counting = np.arange(50_000, dtype=np.uint32)
    sparse = np.zeros(5_000, dtype=np.uint32)
    sparse[draw.integers(0, 5_000, 300)] = draw.integers(1, 4, 300)
    for ids in (random, counting, sparse):
        distinct = len(set(spans_of([ids.tolist()])))
        assert len(np.unique(spans_in(ids, 0))) == distinct


def test_a_store_tells_the_share_of_its_own_documents(tmp_path):
    verse = "From fairest creatures we desire increase, that thereby beauty's rose might never die. "
    texts = [verse, "Another beginning. " + verse[:60], verse[40:] + verse[:40], "short"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(tokenizer="bytes", val_docs=(1, 2), cross_dedup=False)
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "store", config)
    ids = [list(text.encode()) for text in texts]
    expected = share_by_hand([ids[0], ids[3]], [ids[1], ids[2]])
    assert 0 < expected < 1
    found = TokenStore(tmp_path / "store").facts["splits"]["val"]["share_in_train"]
    assert found == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.integers(0, 90), max_size=9), st.integers(0, 3))
def test_spans_of_many_documents_are_those_of_each_alone(lengths, bits):
    documents = [np.random.default_rng(n).integers(0, 9, length, dtype=np.uint32) for n, length in enumerate(lengths)]
    together = np.concatenate([np.empty(0, np.uint32), *documents])
    offsets = np.cumsum([0, *lengths])
    alone = np.concatenate([np.empty(0, np.uint64), *(spans_in(document, bits) for document in documents)])
    found = span_hashes(together, sampled_starts(together, offsets, bits))
    assert found.tolist() == alone.tolist()
    narrow = span_hashes(together.astype(np.uint16), sampled_starts(together.astype(np.uint16), offsets, bits))
    assert narrow.tolist() == found.tolist()
