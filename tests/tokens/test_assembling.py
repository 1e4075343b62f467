"""Near-duplicates of validation by an independent count of grams, and the order in which train is written."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quatrain.errors import QuatrainError
from quatrain.tokens import assembling
from quatrain.tokens.assembling import Bands
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare

BYTES = PrepareConfig(tokenizer="bytes", val_docs=tuple(range(8)), name="same", workers=2)
ALPHABET = "abcdefghijklmnopqrstuvwxyz "


def json_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(folder: Path, split: str) -> list[str]:
    store = TokenStore(folder)
    return store.tokenizer.decode(getattr(store, split)[:].tolist()).split("<|endoftext|>")[1:-1]


def grams(text: str) -> set[str]:
    return {text[place : place + 5] for place in range(len(text) - 4)}


def jaccard(one: str, other: str) -> float:
    return len(grams(one) & grams(other)) / max(1, len(grams(one) | grams(other)))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Eight texts for validation, and after them copies of theirs, changed in more and more places, and others."""
    draw = random.Random(7)

    def new(length: int) -> str:
        return "".join(draw.choices(ALPHABET, k=length))

    def changed(text: str) -> str:
        letters = list(text)
        for place in draw.sample(range(len(text)), int(len(text) * draw.random() ** 3 * 0.15)):
            letters[place] = draw.choice(ALPHABET)
        return "".join(letters) + draw.choice(["", " and more", new(200)])

    lengths = [60, 98, 100, 300, 300, 500, 700, 900]
    val = [new(length) for length in lengths]
    more = [*(changed(draw.choice(val)) for _ in range(90)), *(new(draw.choice(lengths)) for _ in range(30))]
    return list(dict.fromkeys([*val, *more]))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(assembling, "BLOCK", 1500)


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("indexed", [1, 1 << 20])
def test_what_is_like_a_validation_document_is_left_out_of_train(tmp_path, monkeypatch, texts, threshold, indexed):
    monkeypatch.setattr(assembling, "INDEXED", indexed)  # validation documents one by one, or all at once
    val, rest = texts[:8], texts[8:]
    told = prepare([json_lines(tmp_path / "a.jsonl", texts)], tmp_path / "s", replace(BYTES, near_threshold=threshold))
    long = [text for text in val if len(text) >= 100]
    near = {text for text in rest if len(text) >= 100 and max(jaccard(text, one) for one in long) >= threshold}
    assert len(near) > 5
    assert texts_of(tmp_path / "s", "train") == [text for text in rest if text not in near]
    assert texts_of(tmp_path / "s", "val") == val
    assert told["near_validation"] == len(near)
    facts = TokenStore(tmp_path / "s").facts
    assert facts["removal"] == {"exact": True, "near": False, "cross": True, "threshold": threshold, "benchmark": None}
    assert [one["kind"] for one in facts["examples"]] == ["near_validation"] * 5
    for one in facts["examples"]:
        document, like = (texts[int(one[key].removeprefix("a.jsonl:")) - 1] for key in ("place", "like"))
        assert one["jaccard"] == pytest.approx(jaccard(document, like), abs=5e-5)
        assert document in near
        assert like in val
        assert document.startswith(one["text"])


def test_without_cross_dedup_they_are_kept(tmp_path, texts):
    told = prepare([json_lines(tmp_path / "a.jsonl", texts)], tmp_path / "s", replace(BYTES, cross_dedup=False))
    assert texts_of(tmp_path / "s", "train") == texts[8:]
    assert told["near_validation"] == 0
    assert TokenStore(tmp_path / "s").facts["removal"]["cross"] is False


def test_a_corpus_of_copies_of_validation_is_one_message(tmp_path):
    text = "".join(random.Random(1).choices(ALPHABET, k=500))
    source = json_lines(tmp_path / "a.jsonl", [text, text + "!"])
    with pytest.raises(QuatrainError) as caught:
        prepare([source], tmp_path / "s", replace(BYTES, val_docs=(0,)))
    assert str(caught.value).startswith(
        "the train split has no document (0 train, 1 val, 1 left out as near-validation; the same text is always in"
    )
    assert "keep more with --no-cross-dedup" in str(caught.value)
    assert not (tmp_path / "s").exists()


def shuffled(folder: Path, sources: list[str], **options: Any) -> tuple[list[str], list[str]]:
    config = replace(BYTES, val_docs=(), val_fraction=0.2, cross_dedup=False, **options)
    prepare(sources, folder, config)
    return texts_of(folder, "train"), texts_of(folder, "val")


def test_a_shuffled_order_is_a_permutation_that_follows_from_the_seed_and_the_texts(tmp_path, texts):
    cuts = (texts[:40], texts[40:45], texts[45:])
    sources = [json_lines(tmp_path / f"{number}.jsonl", some) for number, some in enumerate(cuts)]
    plain, plain_val = shuffled(tmp_path / "plain", sources)
    assert plain == [text for text in texts if text not in plain_val]
    found = []
    for number, order in enumerate(permutations(sources)):
        train, val = shuffled(tmp_path / f"{number}", list(order), shuffle=3)
        found.append(train)
        assert sorted(val) == sorted(plain_val)
        assert TokenStore(tmp_path / f"{number}").facts["shuffle"] == 3
    assert all(train == found[0] for train in found)
    assert Counter(found[0]) == Counter(plain)
    other = shuffled(tmp_path / "other", sources, shuffle=4)[0]
    assert Counter(other) == Counter(plain)
    assert len({tuple(plain), tuple(found[0]), tuple(other)}) == 3


def test_a_shuffled_order_is_even(tmp_path):
    """Every place of the first document is about as likely, over the seeds: chi-squared with 9 degrees of freedom."""
    texts = [f"document {number}" for number in range(200)]
    source = json_lines(tmp_path / "a.jsonl", texts)
    places = []
    for seed in range(60):
        config = replace(BYTES, shuffle=seed, cross_dedup=False)
        prepare([source], tmp_path / f"{seed}", config)
        places.append(texts_of(tmp_path / f"{seed}", "train").index(texts[8]))
    counts = np.histogram(places, 10, (0, 192))[0]
    assert ((counts - 6) ** 2 / 6).sum() < 27.9  # p = 0.001


@pytest.mark.parametrize("options", [{}, {"shuffle": 5}, {"near_threshold": 0.9, "allow_duplicates": True}])
def test_a_store_is_the_same_for_any_number_of_workers_and_any_blocks(tmp_path, monkeypatch, texts, options):
    source = json_lines(tmp_path / "a.jsonl", [*texts, *texts[5:40]])
    stores = []
    for workers, block in ((1, 1 << 20), (4, 700), (2, 1)):
        monkeypatch.setattr(assembling, "BLOCK", block)
        out = tmp_path / f"{workers}"
        prepare([source], out, replace(BYTES, workers=workers, shard_size=5000, **options))
        stores.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert stores[0] == stores[1] == stores[2]


def test_band_hashes_come_back_from_disk_band_by_band(tmp_path):
    whole = np.random.default_rng(0).integers(0, 2**32, (1000, 7), dtype=np.uint32)
    with Bands(tmp_path / "bands.tmp") as bands:
        for start, stop in ((0, 1), (1, 1), (1, 400), (400, 1000)):
            bands.add(whole[start:stop])
        for band in range(7):
            assert np.array_equal(bands.column(band), whole[:, band])
    assert list(tmp_path.iterdir()) == []
