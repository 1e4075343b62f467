"""Every number about a store is what a plain reading of its ids gives."""

import json
import shutil
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from quatrain.errors import DataError
from quatrain.tokens import survey as survey_module
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.facts import MOST_FREQUENT, StoreFacts, store_facts
from quatrain.tokens.rows import row_table
from quatrain.tokens.store import SPLITS, TokenStore
from quatrain.tokens.view import show_store
from quatrain.tokens.writer import prepare
from quatrain.web.store_page import store_page

T = 64


@pytest.fixture(scope="module", params=["bytes", "char", "gpt2"])
def store(request, tmp_path_factory) -> TokenStore:
    """A hundred and twenty documents of words and some of odd characters."""
    folder = tmp_path_factory.mktemp("facts")
    rng = np.random.default_rng(11)
    words = ["the", "of", "and", "sea", "Übung", "日本", "🙂", "\n"]
    texts = [" ".join(rng.choice(words, size=rng.integers(1, 90))) for _ in range(120)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(tokenizer=request.param, val_docs=(3, 77, 110), shard_size=999)
    prepare([folder / "texts.jsonl"], folder / "store", config)
    return TokenStore(folder / "store")


@pytest.fixture(scope="module")
def facts(store) -> StoreFacts:
    return store_facts(store, T, windows=3, verify=True)


def documents(store, name) -> list[list[int]]:
    """The ids of each document, cut at the eots."""
    ids = np.asarray(store.split(name)).tolist()
    places = [place for place, token in enumerate(ids) if token == store.eot]
    return [ids[first + 1 : last] for first, last in pairwise(places)]


@pytest.mark.parametrize("name", SPLITS)
def test_lengths_and_bytes(store, facts, name):
    texts = documents(store, name)
    numbers = sorted(map(len, texts))
    told = facts.splits[name]
    assert told.documents == len(texts) == sum(bin.documents for bin in told.lengths.histogram)
    for bin in told.lengths.histogram:
        assert bin.documents == sum(bin.first <= number <= bin.last for number in numbers)
    assert told.lengths.mean == pytest.approx(np.mean(numbers))
    assert (told.lengths.quantiles["shortest"], told.lengths.quantiles["longest"]) == (numbers[0], numbers[-1])
    assert told.lengths.quantiles["median"] == numbers[(len(numbers) - 1) // 2]
    text_bytes = sum(len(store.tokenizer.decode(ids).encode()) for ids in texts)
    assert told.bytes == text_bytes
    assert told.bytes_per_token == pytest.approx(text_bytes / sum(numbers))


@pytest.mark.parametrize("name", SPLITS)
def test_padding_is_what_filled_rows_waste_at_every_length(store, facts, name):
    told = facts.splits[name].padding
    for seq_len, share in told.share_by_seq_len.items():
        rows = wasted = 0
        for ids in documents(store, name):
            targets = [*ids, store.eot]
            for start in range(0, len(targets), seq_len):
                rows += 1
                wasted += seq_len - len(targets[start : start + seq_len])
        assert share == pytest.approx(wasted / (rows * seq_len))
        if seq_len == T:
            assert (told.formula.rows, told.formula.wasted) == (rows, wasted)
            assert told.measured == told.formula
    table = row_table(store.split(name), T, "best_fit")
    packed = told.best_fit
    assert (packed.documents, packed.rows, packed.wasted) == (table.documents, table.rows, table.padding)
    assert (packed.share, told.cut) == (table.padding / (table.rows * T), table.cut)
    n = len(store.split(name))
    assert told.packed_windows * T + told.left_out == n - 1
    assert T in told.share_by_seq_len


@pytest.mark.parametrize("name", SPLITS)
def test_targets_are_all_ids_but_the_first(store, facts, name):
    expected = Counter(np.asarray(store.split(name)).tolist()[1:])
    told = facts.splits[name].targets
    assert told.targets == told.counted == len(store.split(name)) - 1 == sum(expected.values())
    assert (told.whole, told.used, told.never) == (True, len(expected), store.vocab_size - len(expected))
    ranked = sorted(expected.items(), key=lambda item: (-item[1], item[0]))
    assert [(one.id, one.count) for one in told.most_frequent] == ranked[:MOST_FREQUENT]
    for one in told.most_frequent:
        assert one.share == one.count / told.counted
        assert one.text == store.tokenizer.decode([one.id])
        assert (one.bytes is None) == ("\ufffd" not in one.text)
    assert all(count == ranked[rank - 1][1] for rank, count in told.curve)
    assert (told.curve[0][0], told.curve[-1][0]) == (1, len(ranked))
    counts = [count for _, count in ranked]
    assert sum(counts[: told.half]) >= told.counted / 2 > sum(counts[: told.half - 1])


def test_the_whole_is_the_sum_of_its_splits(store, facts):
    assert facts.documents == sum(one.documents for one in facts.splits.values()) == 120
    assert facts.tokens == len(store.train) + len(store.val)
    ids = facts.tokens - facts.documents - len(SPLITS)
    assert facts.bytes_per_token == pytest.approx(facts.bytes / ids)
    files = [path for path in store.folder.iterdir() if path.name != "store.json"]
    assert facts.verified == {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def test_json_is_store_json_with_the_facts_beside_its_keys(store, facts):
    told = json.loads(json.dumps(facts.json()))
    assert {key: told[key] for key in store.facts if key != "splits"} == {
        key: value for key, value in store.facts.items() if key != "splits"
    }
    for name in SPLITS:
        assert told["splits"][name].items() >= store.facts["splits"][name].items()
        assert told["splits"][name]["targets"]["never"] == facts.splits[name].targets.never
    assert [window["start"] for window in told["windows"]] == [window.start for window in facts.windows]


def test_an_id_of_half_a_character_is_told_by_its_bytes(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "ééé"}\n{"text": "é"}\n')
    prepare([tmp_path / "texts.jsonl"], tmp_path / "store", PrepareConfig(tokenizer="bytes", val_docs=(1,)))
    most = store_facts(TokenStore(tmp_path / "store"), T, 0).splits["train"].targets.most_frequent
    assert [(one.id, one.bytes) for one in most] == [(0xA9, "a9"), (0xC3, "c3"), (256, None)]


def test_a_sample_says_that_it_is_one_and_all_reads_everything(store, monkeypatch):
    for name, value in {"SAMPLE": 2048, "BLOCKS": 8, "RUNS": 2}.items():
        monkeypatch.setattr(survey_module, name, value)
    sampled = store_facts(store, T, 0).splits["train"]
    assert (sampled.targets.whole, sampled.targets.counted) == (False, 2048)
    assert 0 < sampled.padding.measured.documents < sampled.documents
    whole = store_facts(store, T, 0, everything=True).splits["train"]
    assert (whole.targets.whole, whole.targets.counted) == (True, len(store.train) - 1)
    assert whole.padding.measured == whole.padding.formula == sampled.padding.formula  # the index is always read whole
    assert whole.lengths == sampled.lengths


def test_a_store_without_validation_and_bytes_is_told(store, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(store.folder, folder)
    facts = json.loads((folder / "store.json").read_text())
    facts["splits"]["val"] |= {"shards": [], "tokens": 0, "documents": 0, "bytes": None}
    (folder / facts["splits"]["val"]["idx"]["file"]).write_bytes(b"")
    (folder / "store.json").write_text(json.dumps(facts))
    found = store_facts(TokenStore(folder), T, 1)
    val = found.splits["val"]
    assert (found.bytes, val.bytes_per_token, val.lengths.mean, val.targets.targets) == (None, None, 0.0, 0)
    assert (val.padding.formula.rows, val.padding.packed_windows, val.padding.left_out) == (0, 0, 0)
    show_store(found)
    assert store_page(found).count("unknown") == 2


def test_verify_names_every_damaged_file(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    folder = tmp_path / "store"
    prepare([tmp_path / "texts.jsonl"], folder, PrepareConfig(tokenizer="bytes", val_docs=(1,)))
    for name in ("texts_train_000000.bin", "texts_val.idx"):
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        store_facts(TokenStore(folder), T, 0, verify=True)
    lines = str(caught.value).splitlines()
    assert ["texts_train_000000.bin" in line for line in lines] == [True, False]
    assert ["texts_val.idx" in line for line in lines] == [False, True]
