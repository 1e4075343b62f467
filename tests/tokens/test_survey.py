"""What was counted is what a plain count finds, over all ids or over the sample."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from quatrain.errors import DataError
from quatrain.tokens import survey as survey_module
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.lengths import document_lengths
from quatrain.tokens.store import TokenStore
from quatrain.tokens.survey import survey
from quatrain.tokens.writer import prepare


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    """Four hundred documents of bytes over many shards."""
    folder = tmp_path_factory.mktemp("survey")
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice(list("abcdefgh é\n"), size=rng.integers(1, 120))) for _ in range(400)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "texts.jsonl"], folder / "store", PrepareConfig(tokenizer="bytes", shard_size=5000))
    return TokenStore(folder / "store")


@pytest.fixture
def _small_sample(monkeypatch):
    for name, value in {"SAMPLE": 4096, "BLOCKS": 16, "RUNS": 8, "DOCUMENTS": 64, "CHUNK": 100, "MAPPED": 250}.items():
        monkeypatch.setattr(survey_module, name, value)


@pytest.mark.parametrize("name", ["train", "val"])
@pytest.mark.parametrize("chunk", [7, 1000, 1 << 20])
def test_every_id_but_the_first_is_a_target_once(store, monkeypatch, name, chunk):
    monkeypatch.setattr(survey_module, "CHUNK", chunk)
    seen = survey(store, name, 32, everything=False)
    ids = np.asarray(store.split(name)).tolist()
    assert seen.whole
    assert {token: count for token, count in enumerate(seen.counts.tolist()) if count} == Counter(ids[1:])
    assert (seen.padded.rows, seen.padded.wasted) == document_lengths(store, name).padded(32)


@pytest.mark.usefixtures("_small_sample")
def test_a_large_split_is_sampled_in_blocks_from_everywhere_unless_all_is_asked_for(store):
    ids = np.asarray(store.train)
    spans = survey_module._blocks(len(ids))
    assert len(spans) == 16
    assert spans[0][0] >= 1
    assert all(before[1] <= behind[0] for before, behind in pairwise(spans))
    assert spans[-1][1] <= len(ids)
    assert spans[-1][0] > 0.9 * len(ids) - 256
    seen = survey(store, "train", 32, everything=False)
    assert not seen.whole
    expected = Counter(token for start, stop in spans for token in ids[start:stop].tolist())
    assert {token: count for token, count in enumerate(seen.counts.tolist()) if count} == expected
    assert seen.counts.sum() == 4096 < len(ids)
    everything = survey(store, "train", 32, everything=True)
    assert everything.whole
    assert everything.counts.sum() == len(ids) - 1


@pytest.mark.usefixtures("_small_sample")
def test_sampled_documents_are_whole_ones(store):
    starts = store.document_starts("train").tolist()
    seen = survey(store, "train", 32, everything=False).padded
    runs = survey_module._runs(store.document_starts("train"))
    bounds = [*starts, len(store.train) - 1]
    rows = wasted = documents = 0
    for start, stop in runs:
        assert start in starts
        for begin, end in pairwise(bounds):
            if start <= begin and end < stop:
                documents += 1
                rows += -(-(end - begin) // 32)
                wasted += -(end - begin) % 32
    assert (seen.documents, seen.rows, seen.wasted) == (documents, rows, wasted)
    assert documents >= 32


@pytest.mark.parametrize("documents", [1, 2, 5, 31, 33, 100, 10_000])
def test_runs_of_documents_lie_in_the_index_and_stay_small(documents):
    starts = np.arange(documents, dtype=np.uint64) * np.uint64(1000)
    runs = survey_module._runs(starts)
    assert bool(runs) == (documents > 1)
    assert len(runs) <= 2 * survey_module.RUNS
    assert all(0 <= start < stop <= starts[-1] + 1 for start, stop in runs)
    assert sum(stop - start for start, stop in runs) <= survey_module.SAMPLE * 2


def test_an_id_beyond_the_vocabulary_is_named(store, monkeypatch):
    monkeypatch.setattr(store, "vocab_size", 200)
    with pytest.raises(DataError, match=r"id 256 stands in train, and the vocabulary has 200 ids; .* --verify"):
        survey(store, "train", 32, everything=False)
