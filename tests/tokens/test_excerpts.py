"""Windows are the ids of the split, cut where documents begin."""

import json

import numpy as np
import pytest

from quatrain.text.tokenizers import ByteTokenizer
from quatrain.tokens import excerpts as excerpts_module
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.excerpts import excerpts
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare


def store_of(folder, texts, **options) -> TokenStore:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(
        **{"tokenizer": "bytes", "val_docs": (0,), "cross_dedup": False, "allow_duplicates": True, "shard_size": 50}
        | options
    )
    prepare([folder / "texts.jsonl"], folder / "store", config)
    return TokenStore(folder / "store")


@pytest.mark.parametrize("T", [1, 2, 7, 40, 1000, 10**6])
@pytest.mark.parametrize("lengths", [[5] * 30, [200, 3, 1, 1, 400], [300], [1, 1]])
def test_the_parts_of_a_window_are_its_ids_and_each_says_its_document(tmp_path, T, lengths):
    rng = np.random.default_rng(3)
    texts = [
        "held out",
        *("".join(rng.choice(list("abc\n"), size=length)) + str(n) for n, length in enumerate(lengths)),
    ]
    store = store_of(tmp_path, texts)
    ids = np.asarray(store.train).tolist()
    for window in excerpts(store, "train", T, 3):
        assert window.ids == min(T, len(ids) - 1) + 1
        told = ids[window.start : window.start + window.ids]
        joined = [token for part in window.parts for token in part.text.encode()]
        assert joined == [token for token in told if token != ByteTokenizer.eot]
        for part in window.parts:
            assert part.text in texts[part.document]
            assert part.begins == (texts[part.document].startswith(part.text) and 256 in told) or not part.text or T < 7
        begun = [part.document for part in window.parts if part.begins]
        assert len(begun) == sum(token == 256 for token in told) - (window.start + window.ids == len(ids))


@pytest.mark.parametrize("T", [8, 30, 100])
def test_one_window_holds_a_border_if_there_is_one(tmp_path, T):
    many = store_of(tmp_path, ["held out", "a" * 3000, "b" * 3000])
    windows = excerpts(many, "train", T, 3)
    assert len(windows) == 3
    assert [len(window.parts) for window in windows][-1] == 2
    assert [part.text[0] for part in windows[-1].parts] == ["a", "b"]
    assert [part.document for part in windows[-1].parts] == [1, 2]
    assert [len(window.parts) for window in excerpts(many, "train", T, 1)] == [2]


def test_a_border_among_the_candidates_is_found_without_reading_ids(tmp_path, monkeypatch):
    store = store_of(tmp_path, ["held out", *["abcdefghij" * 40] * 6])
    monkeypatch.setattr(excerpts_module, "CANDIDATES", 100_000)
    (window,) = excerpts(store, "train", 4, 1)
    assert [part.begins for part in window.parts] == [False, True]


def test_the_same_store_shows_the_same_windows_and_one_document_has_no_border(tmp_path):
    store = store_of(tmp_path, ["held out", "x" * 500])
    windows = excerpts(store, "train", 10, 3)
    assert windows == excerpts(TokenStore(store.folder), "train", 10, 3)
    assert [len(window.parts) for window in windows] == [1, 1, 1]
    assert excerpts(store, "train", 10, 0) == []
    assert len(excerpts(store, "train", 10_000, 3)) == 1  # there is no other window


def test_windows_of_one_id_or_none(tmp_path):
    store = store_of(tmp_path, ["held out", "x"])
    (window,) = excerpts(store, "train", 1024, 5)
    assert [(part.document, part.begins, part.text) for part in window.parts] == [(1, True, "x")]


def test_a_window_that_nobody_would_read_is_not_decoded(tmp_path):
    store = store_of(tmp_path, ["held out", "x" * 40_000], shard_size=10_000)
    assert [window.ids for window in excerpts(store, "train", 10**9, 1)] == [excerpts_module.LONGEST]
