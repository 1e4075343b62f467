"""Which document goes where, by an independent reading of the rules: the first of equals stays, validation first."""

import json
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.text import lines, reading
from quatrain.tokens import tokenizing
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare

BYTES = PrepareConfig(tokenizer="bytes", cross_dedup=False, skip_bad=True)
TEXTS = ["", "a", "b", "c", "d", "e", "equal", "equal ", "long " * 9, None]


def json_lines(path: Path, texts: list[str | None]) -> str:
    path.write_text("".join(json.dumps({"of": path.name, "text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(folder: Path, split: str) -> list[str]:
    store = TokenStore(folder)
    text = store.tokenizer.decode(getattr(store, split)[:].tolist())
    return text.split("<|endoftext|>")[1:-1]


def held_out(text: str, fraction: float, seed: int) -> bool:
    return xxhash.xxh3_64_intdigest(text.encode(), seed) < fraction * 2**64


def without_repetitions(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


@pytest.fixture(scope="module", autouse=True)
def in_many_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        for module, name, value in (
            (lines, "CHUNK", 20),
            (lines, "READ", 9),
            (reading, "SPAN", 50),
            (tokenizing, "UNIT_BYTES", 80),
            (tokenizing, "PART_BYTES", 10),
        ):
            patch.setattr(module, name, value)
        yield


@given(
    corpus=st.lists(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12), min_size=1, max_size=3),
    fraction=st.sampled_from([0.3, 0.6]),
    seed=st.integers(0, 9),
    keep=st.booleans(),
)
def test_of_equal_texts_the_first_in_the_corpus_is_kept(tmp_path_factory, corpus, fraction, seed, keep):
    folder = tmp_path_factory.mktemp("x")
    sources = [json_lines(folder / f"{number}.jsonl", texts) for number, texts in enumerate(corpus)]
    present = [text for texts in corpus for text in texts]
    texts = [text for text in present if text]
    train = [text for text in texts if not held_out(text, fraction, seed)]
    val = [text for text in texts if held_out(text, fraction, seed)]
    config = replace(BYTES, val_fraction=fraction, seed=seed, allow_duplicates=keep)
    if not train or not val:
        return
    told = prepare(sources, folder / "store", config)
    if not keep:
        train, val = without_repetitions(train), without_repetitions(val)
    assert texts_of(folder / "store", "train") == train
    assert texts_of(folder / "store", "val") == val
    assert told["duplicates"] == len(texts) - len(train) - len(val)
    assert told["empty"] == present.count("")
    assert told["skipped"] == present.count(None)
    rows = [source["rows"] for source in TokenStore(folder / "store").facts["sources"]]
    assert rows == [len(texts) for texts in corpus]


def facts_of(folder: Path) -> dict[str, Any]:
    return TokenStore(folder).facts


@pytest.mark.parametrize("keep", [False, True])
def test_a_text_of_validation_files_is_left_out_of_train_though_it_stands_there_first(tmp_path, keep):
    source = json_lines(tmp_path / "a.jsonl", ["both", "one", "both", "one"])
    val = json_lines(tmp_path / "b.jsonl", ["val", "both", "val"])
    config = replace(BYTES, val=(val,), allow_duplicates=keep)
    told = prepare([source], tmp_path / "store", config)
    assert texts_of(tmp_path / "store", "train") == (["one", "one"] if keep else ["one"])
    assert texts_of(tmp_path / "store", "val") == (["val", "both", "val"] if keep else ["val", "both"])
    assert told["duplicates"] == (2 if keep else 4)
    told_of = [(one["place"], one["like"], one["text"]) for one in facts_of(tmp_path / "store")["examples"]]
    across = [("a.jsonl:1", "b.jsonl:2", "both"), ("a.jsonl:3", "b.jsonl:2", "both")]
    within = [("a.jsonl:4", "a.jsonl:2", "one"), ("b.jsonl:3", "b.jsonl:1", "val")]
    assert told_of == (across if keep else across + within)


@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=2, max_size=15),
    wanted=st.sets(st.integers(0, 14), min_size=1, max_size=3),
)
def test_val_docs_count_what_is_empty_or_skipped_too(tmp_path_factory, texts, wanted):
    folder = tmp_path_factory.mktemp("x")
    half = len(texts) // 2
    sources = [json_lines(folder / "0.jsonl", texts[:half]), json_lines(folder / "1.jsonl", texts[half:])]
    config = replace(BYTES, val_docs=tuple(wanted))
    chosen = {texts[index] for index in wanted if index < len(texts)}
    kept = without_repetitions([text for text in texts if text])
    if len(kept) < 2:
        return
    if max(wanted) >= len(texts):
        first = min(index for index in wanted if index >= len(texts))
        last = len(texts) - 1
        with pytest.raises(DataError, match=rf"names document {first}, and there are {len(texts)} \(0 to {last}\)"):
            prepare(sources, folder / "store", config)
    elif chosen & set(kept) and set(kept) - chosen:
        prepare(sources, folder / "store", config)
        assert texts_of(folder / "store", "val") == [text for text in kept if text in chosen]
        assert texts_of(folder / "store", "train") == [text for text in kept if text not in chosen]
    else:
        with pytest.raises(DataError, match=r"the (train|val) split has no document"):
            prepare(sources, folder / "store", config)


def test_the_order_of_the_sources_decides_the_order_and_nothing_else(tmp_path):
    draw = random.Random(5)
    corpus = {name: draw.choices(TEXTS, k=20) for name in ("0", "1", "2")}
    sources = [json_lines(tmp_path / f"{name}.jsonl", texts) for name, texts in corpus.items()]
    config = replace(BYTES, val_fraction=0.5, name="same")
    found = []
    for number, order in enumerate(permutations(sources)):
        told = prepare(order, tmp_path / f"store{number}", config)
        sets = tuple(tuple(sorted(texts_of(tmp_path / f"store{number}", split))) for split in ("train", "val"))
        found.append((sets, told["duplicates"], told["empty"], told["skipped"]))
    assert len(set(found)) == 1


def test_of_each_kind_that_is_left_out_a_few_examples_are_told(tmp_path):
    texts = ["held out", *["again"] * 20, *[None] * 20, "last"]
    source = json_lines(tmp_path / "a.jsonl", texts)
    prepare([source], tmp_path / "store", replace(BYTES, val_docs=(0,)))
    facts = facts_of(tmp_path / "store")
    assert facts["counts"] | {"duplicates": 19, "skipped": 20} == facts["counts"]
    assert facts["skipped"] == {"text is no string": 20}
    told = [(one["kind"], one["place"]) for one in facts["examples"]]
    assert told == [
        *(("duplicate", f"a.jsonl:{number}") for number in range(3, 8)),
        *(("skipped", f"a.jsonl:{number}") for number in range(22, 27)),
    ]
    assert facts["examples"][0] == {
        "kind": "duplicate",
        "place": "a.jsonl:3",
        "like": "a.jsonl:2",
        "jaccard": None,
        "text": "again",
    }
    assert facts["examples"][-1]["reason"] == "text is no string"
    assert facts["examples"][-1]["text"] == "column 'text' holds null, expected a string"
