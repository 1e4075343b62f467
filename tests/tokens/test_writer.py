"""A store holds every document once, in order, on one side, the same bytes each time; and `--out` is never harmed."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quatrain import TokenStore, prepare, sample_batch
from quatrain.errors import ConfigError, DataError, QuatrainError, UsageError
from quatrain.text import lines, reading
from quatrain.text.tokenizers import EOT_TEXT, ByteTokenizer
from quatrain.tokens import encoding, shards, tokenizing
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.job import Job

BYTES = PrepareConfig(tokenizer="bytes", val_docs=(0,), cross_dedup=False)
EOT = 256  # of `bytes`

# Lone surrogates are legal in JSON; "alpha" and "omega" meet their equals.
SPECIAL = ["", "alpha", "omega", "omega ", EOT_TEXT, "\ud800", "a\udfffb", "\ud83d\ude00", "\n", "é" * 20]
TEXTS = st.lists(st.sampled_from(SPECIAL) | st.text(st.characters(), max_size=20), max_size=8)


def json_lines(path: Path, *texts: object) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def cleaned(text: str) -> str:
    """What JSON makes of a text: pairs of surrogates joined, and each one left alone replaced."""
    return re.sub("[\ud800-\udfff]", "\ufffd", json.loads(json.dumps(text)))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything that would show if a file had been touched."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes())
        for path in folder.rglob("*")
    }


def ids_of(folder: Path, split: str) -> list[int]:
    """The ids of a split as they lie in its files, without our reader."""
    return np.concatenate([np.fromfile(f, dtype="<u2") for f in sorted(folder.glob(f"*_{split}_*.bin"))]).tolist()


def texts_of(folder: Path, split: str) -> list[str]:
    """The documents of a split, cut at the index and decoded."""
    store = TokenStore(folder)
    ids, starts = ids_of(folder, split), store.document_starts(split).tolist()
    ends = [*starts[1:], len(ids) - 1]
    return [store.tokenizer.decode(ids[start + 1 : end]) for start, end in zip(starts, ends, strict=True)]


def stream_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (EOT, *text.encode())] + [EOT]


def corpus(texts: list[str], place: int) -> tuple[list[str], int]:
    """Texts around one "omega" to hold out and one "alpha" to keep, and the index of that omega."""
    place %= len(texts) + 1
    return [*texts[:place], "omega", *texts[place:], "alpha"], place


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    """Hundreds of small stores: what is tested here does not depend on a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def three(tmp_path) -> str:
    return json_lines(tmp_path / "three.jsonl", "one", "two", "three")


@given(texts=TEXTS, place=st.integers(0, 8), shard_size=st.integers(2, 50), workers=st.integers(1, 3))
def test_case_10_shard_borders_lose_nothing_and_texts_keep_their_order(
    tmp_path_factory, texts, place, shard_size, workers
):
    folder = tmp_path_factory.mktemp("x")
    texts, place = corpus(texts, place)
    config = replace(BYTES, val_docs=(place,), shard_size=shard_size, workers=workers, allow_duplicates=True)
    told = prepare([json_lines(folder / "a.jsonl", *texts)], folder / "store", config)
    whole = [cleaned(text) for text in texts]
    expected = {"train": [t for t in whole if t and t != "omega"], "val": [t for t in whole if t == "omega"]}
    splits = TokenStore(folder / "store").facts["splits"]
    for split, documents in expected.items():
        stream = stream_of(documents)
        assert ids_of(folder / "store", split) == stream
        assert texts_of(folder / "store", split) == documents
        *full, last = (shard["tokens"] for shard in splits[split]["shards"])
        assert set(full) <= {shard_size}
        assert 1 <= last <= shard_size
        assert splits[split]["tokens"] == told[f"{split}_tokens"] == len(stream)
        assert splits[split]["documents"] == len(documents)
        assert splits[split]["bytes"] == sum(len(text.encode()) for text in documents)
    assert told["tokens"] == told["train_tokens"] + told["val_tokens"]
    assert told["documents"] == len(expected["train"]) + len(expected["val"])
    assert told["empty"] == texts.count("")
    replaced = sum(text.count("\ufffd") for text in whole) - sum(text.count("\ufffd") for text in texts)
    assert told["surrogates"] == replaced


@given(texts=TEXTS, place=st.integers(0, 8), fraction=st.sampled_from([1e-9, 0.1, 0.4]), seed=st.integers(0, 99))
def test_the_same_text_is_never_on_both_sides_of_a_split(tmp_path_factory, texts, place, fraction, seed):
    folder = tmp_path_factory.mktemp("x")
    texts, _ = corpus([*texts, *map(str, range(20)), *texts], place)
    source = json_lines(folder / "a.jsonl", *texts)
    config = replace(BYTES, val_docs=(), val_fraction=fraction, seed=seed, allow_duplicates=True)
    prepare([source], folder / "store", config)
    train, val = (texts_of(folder / "store", split) for split in ("train", "val"))
    assert train
    assert val
    assert not set(train) & set(val)
    whole = [cleaned(text) for text in texts if text]
    assert train == [text for text in whole if text not in val]
    assert val == [text for text in whole if text in val]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "char"])
def test_case_53_eot_stands_once_a_document_and_once_at_the_end(tmp_path, tokenizer):
    assert eots_minus_documents(tmp_path, tokenizer) == {"train": 1, "val": 1}


def test_case_53_a_text_that_forges_eot_ends_the_job(tmp_path, monkeypatch):
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer,
        "encode",
        lambda self, text: np.array([EOT], np.uint32) if text == EOT_TEXT else encode(self, text),
    )
    with pytest.raises(QuatrainError, match=r"gave an id that no text may have, in a batch from .*a\.jsonl:1 on"):
        eots_minus_documents(tmp_path, "bytes")


def eots_minus_documents(folder: Path, tokenizer: str) -> dict[str, int]:
    texts = ["held out", EOT_TEXT, f"a{EOT_TEXT}b{EOT_TEXT}", f"{EOT_TEXT}\n", "<|endof", "text|>"]
    prepare([json_lines(folder / "a.jsonl", *texts)], folder / "store", replace(BYTES, tokenizer=tokenizer))
    store = TokenStore(folder / "store")
    return {
        split: ids_of(folder / "store", split).count(store.eot) - store.facts["splits"][split]["documents"]
        for split in ("train", "val")
    }


def test_case_10_a_document_may_be_longer_than_several_shards(tmp_path):
    long = "0123456789" * 35
    source = json_lines(tmp_path / "a.jsonl", "short", long, "after")
    prepare([source], tmp_path / "store", replace(BYTES, shard_size=100))
    sizes = [shard["tokens"] for shard in TokenStore(tmp_path / "store").facts["splits"]["train"]["shards"]]
    assert sizes == [100, 100, 100, 58]
    assert texts_of(tmp_path / "store", "train") == [long, "after"]


def test_case_09_a_last_shard_that_is_partial_is_said_to_be_done(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", "v" * 8, "a" * 50, "b" * 61)
    said: list[str] = []
    prepare([source], tmp_path / "store", replace(BYTES, shard_size=10), said.append)
    assert "train: 12 shards, last shard partial: 4 tokens, done" in said
    assert "val: 1 shard, the last one full, done" in said


@pytest.mark.parametrize("documents", [2, 10])
def test_cases_07_10_a_corpus_smaller_than_a_shard_has_both_splits(tmp_path, documents):
    source = json_lines(tmp_path / "a.jsonl", *(f"document {number}" for number in range(documents)))
    prepare([source], tmp_path / "store", PrepareConfig(tokenizer="gpt2"))
    names = {"a_train_000000.bin", "a_val_000000.bin", "a_train.idx", "a_val.idx", "tokenizer.json", "store.json"}
    assert set(files(tmp_path / "store")) == names
    assert len(texts_of(tmp_path / "store", "val")) == 1
    assert len(texts_of(tmp_path / "store", "train")) == documents - 1


def test_case_08_a_split_shorter_than_a_window_is_an_error_with_both_numbers(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", "v" * 48, "other")
    prepare([source], tmp_path / "store", BYTES)
    val = TokenStore(tmp_path / "store").val
    assert sample_batch(val, 1, 49, np.random.default_rng(0))[0].shape == (1, 49)
    with pytest.raises(DataError, match=r"50 ids, .* T \+ 1 = 65"):
        sample_batch(val, 1, 64, np.random.default_rng(0))


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "char"])
def test_the_bytes_of_a_store_do_not_depend_on_workers_time_or_place(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(lines, "CHUNK", 100)
    monkeypatch.setattr(lines, "READ", 60)
    monkeypatch.setattr(tokenizing, "PART_BYTES", 300)
    monkeypatch.setattr(reading, "SPAN", 700)
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 700)
    texts = [f"document {number} " * (number % 9) for number in range(150)]
    stores = []
    for workers in (1, 3, 1):
        home = tmp_path / str(len(stores))
        home.mkdir()
        config = PrepareConfig(tokenizer=tokenizer, val_fraction=0.1, shard_size=999, workers=workers)
        prepare([json_lines(home / "a.jsonl", *texts)], home / "store", config)
        stores.append(files(home / "store"))
    assert stores[0] == stores[1] == stores[2]
    assert str(tmp_path).encode() not in stores[0]["store.json"]


def test_batches_are_written_in_order_though_a_later_one_is_done_first(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "CHUNK", 1)
    monkeypatch.setattr(lines, "READ", 8)
    encode, second_is_done = ByteTokenizer.encode, threading.Event()

    def slow_first(self: ByteTokenizer, text: str) -> object:
        if text == "first":
            assert second_is_done.wait(30)
        if text == "second":
            second_is_done.set()
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", slow_first)
    source = json_lines(tmp_path / "a.jsonl", "first", "second", "third", "val")
    prepare([source], tmp_path / "store", replace(BYTES, val_docs=(3,), workers=2))
    assert texts_of(tmp_path / "store", "train") == ["first", "second", "third"]


@pytest.mark.parametrize("workers", [1, 3])
def test_only_a_bounded_number_of_batches_is_read_ahead(workers):
    read: list[int] = []
    ahead = [len(read) - done for done in tokenizing.in_order(abs, (read.append(n) or n for n in range(200)), workers)]
    assert len(ahead) == 200
    assert max(ahead) <= workers * tokenizing.AHEAD_EACH + 1


@pytest.mark.parametrize("fault", ["read", "encode"])
def test_what_goes_wrong_in_a_thread_or_in_reading_is_raised_once(fault):
    def items():
        yield from range(20)
        if fault == "read":
            raise DataError("line 21")

    def encode(number: int) -> int:
        if fault == "encode" and number == 13:
            raise DataError("line 13")
        return number

    done: list[int] = []
    with pytest.raises(DataError, match="line 21" if fault == "read" else "line 13"):
        done.extend(tokenizing.in_order(encode, items(), 2))


def test_case_55_empty_documents_are_left_out_and_counted(tmp_path):
    (tmp_path / "corpus").mkdir()
    json_lines(tmp_path / "corpus" / "a.jsonl", "", "one", "", "two", "")
    (tmp_path / "corpus" / "b.txt").touch()
    told = prepare([str(tmp_path / "corpus")], tmp_path / "store", replace(BYTES, val_docs=(1,)))
    assert (told["documents"], told["empty"]) == (2, 4)
    assert ids_of(tmp_path / "store", "train") == stream_of(["two"])
    assert TokenStore(tmp_path / "store").facts["counts"]["empty"] == 4


@pytest.mark.parametrize(("text", "found"), [(None, "null"), (7, "a number")])
def test_case_55_a_text_that_is_none_is_an_error_and_leaves_nothing(tmp_path, text, found):
    source = json_lines(tmp_path / "a.jsonl", "one", text, "two")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: column 'text' holds {found}, expected a string"):
        prepare([source], tmp_path / "store", replace(BYTES, tokenizer="char"))
    assert not (tmp_path / "store").exists()


def test_case_56_documents_are_separated_by_the_eot_named_and_carry_no_bos(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    bos, eos = (made.token_to_id(word) for word in ("<s>", "</s>"))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    made.save(str(tmp_path / "tokenizer.json"))
    assert made.encode("a").ids == [bos, 0]
    source = json_lines(tmp_path / "a.jsonl", "val", "a b", "b </s> a")
    config = replace(BYTES, tokenizer=str(tmp_path / "tokenizer.json"), eot="</s>")
    prepare([source], tmp_path / "store", config)
    assert ids_of(tmp_path / "store", "train") == [eos, 0, 1, eos, 1, 2, 2, 2, 0, eos]
    assert TokenStore(tmp_path / "store").tokenizer.eot == TokenStore(tmp_path / "store").eot == eos


def test_lone_surrogates_become_the_replacement_character_and_are_counted(tmp_path):
    lines = [r'"val"', r'"a\ud800b"', r'"\ud83d\ude00"', r'"\udfff\ud83d\ud83d\ude00"', '"\ufffd"', r'"\ufffd\ud800"']
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": {line}}}\n' for line in lines))
    told = prepare([str(tmp_path / "a.jsonl")], tmp_path / "store", BYTES)
    assert texts_of(tmp_path / "store", "train") == ["a\ufffdb", "😀", "\ufffd\ufffd😀", "\ufffd", "\ufffd\ufffd"]
    assert told["surrogates"] == 4


def test_documents_to_hold_out_are_named_by_index_and_take_their_equals_along(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", "one", "two", "one", "", "four")
    prepare([source], tmp_path / "store", replace(BYTES, val_docs=(2, 4), allow_duplicates=True))
    assert texts_of(tmp_path / "store", "train") == ["two"]
    assert texts_of(tmp_path / "store", "val") == ["one", "one", "four"]


def test_validation_files_are_a_split_and_their_texts_leave_train(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", "one", "both", "two", "one", "both")
    other = json_lines(tmp_path / "own.jsonl", "both", "val", "val")
    config = PrepareConfig(tokenizer="char", val=(other,), allow_duplicates=True)
    told = prepare([source], tmp_path / "store", config)
    assert texts_of(tmp_path / "store", "train") == ["one", "two", "one"]
    assert texts_of(tmp_path / "store", "val") == ["both", "val", "val"]
    assert told["duplicates"] == 2
    sources = TokenStore(tmp_path / "store").facts["sources"]
    assert [(described["name"], described["rows"]) for described in sources] == [("a.jsonl", 5), ("own.jsonl", 3)]


@pytest.mark.parametrize(("share", "cut"), [(0.1, 22), (0.25, 18), (0.5, 12)])
def test_a_tail_is_cut_at_the_character_and_warned_of(tmp_path, share, cut):
    text = "é23456789\r\n1234567890abcd😀"[:25]
    (tmp_path / "a.txt").write_bytes(text.encode())
    said: list[str] = []
    config = PrepareConfig(tokenizer="char", val_tail=share)
    prepare([str(tmp_path / "a.txt")], tmp_path / "store", config, said.append)
    assert texts_of(tmp_path / "store", "train") == [text[:cut]]
    assert texts_of(tmp_path / "store", "val") == [text[cut:]]
    assert [line for line in said if line.startswith(f"warning: --val-tail splits a document at character {cut} of 25")]


def test_a_tail_is_cut_exactly_where_its_share_says(tmp_path):
    for share, length in product(["0.1", "0.2", "0.3", "0.7", "0.8", "0.9"], [10, 100]):
        folder = tmp_path / f"{share}-{length}"
        folder.mkdir()
        (folder / "a.txt").write_text("x" * length)
        prepare([str(folder / "a.txt")], folder / "store", PrepareConfig(tokenizer="bytes", val_tail=float(share)))
        found = TokenStore(folder / "store").facts["splits"]["train"]["bytes"]
        assert found == (1 - Fraction(share)) * length, (share, length)


def test_empty_documents_beside_a_cut_one_are_counted(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", "", "abcdefghij", "")
    assert prepare([source], tmp_path / "s", PrepareConfig(tokenizer="bytes", val_tail=0.1))["empty"] == 2


@pytest.mark.parametrize("seed", [1337, 4])
def test_when_no_document_falls_below_the_fraction_the_smallest_hash_and_its_equals_do(tmp_path, seed):
    def hashed(text: str) -> int:
        return xxhash.xxh3_64_intdigest(text.encode(), seed)

    texts = [f"document {number % 6}" for number in range(14)]
    smallest = min(texts, key=hashed)
    said: list[str] = []
    config = PrepareConfig(
        "bytes", val_fraction=1e-9, seed=seed, shard_size=20, allow_duplicates=True, cross_dedup=False
    )
    told = prepare([json_lines(tmp_path / "a.jsonl", *texts, "")], tmp_path / "store", config, said.append)
    assert texts_of(tmp_path / "store", "val") == [text for text in texts if text == smallest]
    assert texts_of(tmp_path / "store", "train") == [text for text in texts if text != smallest]
    assert any("no document fell into validation" in line for line in said)
    assert told["empty"] == 1
    named = [
        shard["file"] for split in TokenStore(tmp_path / "store").facts["splits"].values() for shard in split["shards"]
    ]
    assert {path.name for path in (tmp_path / "store").glob("*.bin")} == set(named)  # none of the first pass is left


@pytest.mark.parametrize(
    ("texts", "rule", "message"),
    [
        (["one"], {}, r"a\.jsonl holds one document .*--val-tail 0.1"),
        (
            ["same", "same"],
            {},
            r"the train split has no document \(0 train, 1 val, 1 left out as duplicate;",
        ),
        ([], {}, r"no document with text in .*a\.jsonl \(0 empty\)"),
        (["", ""], {}, r"no document with text in .*a\.jsonl \(2 empty\)"),
        (["one", "two"], {"val_docs": (5, 2)}, r"--val-docs names document 2, and there are 2 \(0 to 1\)"),
        (["one", "two"], {"val_docs": (0, 1)}, r"the train split has no document \(0 train, 2 val; "),
        (["one"], {"val_tail": 0.99}, r"a\.jsonl holds one document .*--val-tail 0.1"),
    ],
)
def test_a_corpus_that_the_rule_cannot_split_is_one_message_and_leaves_nothing(tmp_path, texts, rule, message):
    source = json_lines(tmp_path / "a.jsonl", *texts)
    with pytest.raises(DataError, match=message):
        prepare([source], tmp_path / "deep" / "store", PrepareConfig(tokenizer="bytes", **rule))
    assert not (tmp_path / "deep" / "store").exists()


@pytest.mark.parametrize(
    ("wrong", "messages"),
    [
        ({"val_fraction": 0}, ["val_fraction 0 holds nothing out; give val_docs, val_tail, validation files, or a"]),
        ({"val_fraction": 1.0}, ["val_fraction is 1.0, it must be at least 0 and below 1"]),
        ({"val_fraction": float("nan")}, ["val_fraction is nan, it must be finite"]),
        ({"val_docs": (1,), "val": ("b.txt",)}, ["val_docs, val_tail and validation files each decide the split"]),
        ({"val_docs": (3, -1)}, [r"val_docs holds a negative index \(-1\)"]),
        ({"seed": 2**63, "shard_size": 0, "workers": 0}, ["seed is", "shard_size is 0", "workers is 0"]),
        ({"seed": -1}, [r"seed is -1, it must be in 0 \.\. 2\^63 - 1"]),
        ({"eot": "</s>"}, [r"eot is '</s>', and the tokenizer gpt2 has <\|endoftext\|>; leave it out"]),
    ],
)
def test_wrong_settings_are_all_named_at_once(wrong, messages):
    with pytest.raises(ConfigError) as caught:
        PrepareConfig(**wrong)
    assert len(caught.value.mistakes) == len(messages)
    for message in messages:
        assert re.search(rf"(^|- ){message}", str(caught.value))


@pytest.mark.parametrize(
    ("file", "name", "stem"),
    [
        ("my data (1).jsonl", "", "mydata1"),
        ("Web_text-2.0.jsonl", "", "Web_text-2.0"),
        ("日本.jsonl", "", "data"),
        ("a.jsonl", "edufineweb", "edufineweb"),
        ("a.jsonl", "../up", "..up"),
    ],
)
def test_shards_are_named_after_the_source_or_as_told(tmp_path, file, name, stem):
    prepare([json_lines(tmp_path / file, "a", "b")], tmp_path / "store", replace(BYTES, name=name))
    assert {path.name for path in (tmp_path / "store").glob("*.bin")} == {
        f"{stem}_train_000000.bin",
        f"{stem}_val_000000.bin",
    }


def test_a_file_name_that_is_not_utf_8_does_not_lose_the_work(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9t\xe9.jsonl")
    json_lines(Path(name), "a", "b")
    prepare([name], tmp_path / "store", BYTES)
    assert TokenStore(tmp_path / "store").facts["sources"][0]["rows"] == 2


def test_equal_input_gives_an_equal_store_wherever_the_tokenizer_lies(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    made.add_special_tokens([EOT_TEXT])
    source = json_lines(tmp_path / "a.jsonl", "a", "b")
    for home in (tmp_path / "x", tmp_path / "y"):
        home.mkdir()
        made.save(str(home / "tokenizer.json"))
        prepare([source], home / "store", replace(BYTES, tokenizer=str(home / "tokenizer.json")))
    assert files(tmp_path / "x" / "store") == files(tmp_path / "y" / "store")


def test_what_a_folder_holds_besides_documents_is_reported(tmp_path):
    (tmp_path / "corpus").mkdir()
    json_lines(tmp_path / "corpus" / "a.jsonl", "one", "two")
    (tmp_path / "corpus" / "notes.md").touch()
    said: list[str] = []
    prepare([str(tmp_path / "corpus")], tmp_path / "store", BYTES, said.append)
    assert [line for line in said if "notes.md" in line] == [
        f"passed over {tmp_path / 'corpus' / 'notes.md'}: not a kind of file that holds documents"
    ]


@pytest.mark.parametrize("present", [None, "empty", "absent/below"])
def test_out_may_be_absent_or_empty(three, tmp_path, present):
    out = tmp_path / (present or "absent")
    if present == "empty":
        out.mkdir()
    prepare([three], out, BYTES)
    assert texts_of(out, "train") == ["two", "three"]


@pytest.mark.parametrize("name", ["notes.txt", "three_train_000000.bin", "tokenizer.json", "prepare.json", "sub"])
def test_out_with_a_foreign_file_is_named_and_left_untouched(three, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).mkdir() if name == "sub" else (out / name).write_text("{}")
    before = state(out)
    with pytest.raises(DataError, match=f"out/{re.escape(name)}: --out must be absent, empty or our own.*not ours"):
        prepare([three], out, BYTES)
    assert state(out) == before


def test_out_that_is_a_file_is_left_untouched(three, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DataError, match="out: a file; --out must be a folder that is absent, empty or our own"):
        prepare([three], tmp_path / "out", BYTES)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_finished_store_of_the_same_request_is_left_as_it_is(three, tmp_path):
    told = prepare([three], tmp_path / "store", BYTES)
    before = state(tmp_path / "store")
    (tmp_path / "moved").mkdir()
    moved = json_lines(tmp_path / "moved" / "three.jsonl", "one", "two", "three")
    said: list[str] = []
    again = prepare([moved], tmp_path / "store", replace(BYTES, workers=3), said.append)
    assert state(tmp_path / "store") == before
    assert again | {"seconds": 0} == told | {"seconds": 0}
    assert said == [f"{tmp_path / 'store'} already holds the store of this request"]


OTHER_REQUESTS: dict[str, Callable[[list[str], PrepareConfig], tuple[list[str], PrepareConfig]]] = {
    "shard size": lambda sources, config: (sources, replace(config, shard_size=5)),
    "tokenizer": lambda sources, config: (sources, replace(config, tokenizer="char")),
    "held out": lambda sources, config: (sources, replace(config, val_docs=(1,))),
    "seed": lambda sources, config: (sources, replace(config, seed=1)),
    "name": lambda sources, config: (sources, replace(config, name="other")),
    "order": lambda sources, config: (sources[::-1], replace(config, name="three")),
    "fewer": lambda sources, config: (sources[:1], config),
}


@pytest.mark.parametrize("change", OTHER_REQUESTS)
@pytest.mark.parametrize("kind", ["finished", "unfinished"])
def test_a_store_of_another_request_is_refused_and_left_untouched(three, tmp_path, change, kind):
    sources, out = [three, json_lines(tmp_path / "more.jsonl", "four")], tmp_path / "store"
    prepare(sources, out, BYTES)
    if kind == "unfinished":
        make_unfinished(out, plan_of(sources, out, BYTES))
    before = state(out)
    with pytest.raises(DataError, match=rf"store: holds an? {kind} store of other sources|not ours, nothing was touch"):
        prepare(*OTHER_REQUESTS[change](sources, BYTES)[:1], out, OTHER_REQUESTS[change](sources, BYTES)[1])
    assert state(out) == before


def plan_of(sources: list[str], out: Path, config: PrepareConfig) -> str:
    return Job.plan(sources, out, config, lambda line: None).claim().plan


def make_unfinished(folder: Path, plan: str) -> None:
    """Turn a finished store into what a stop in the middle of writing leaves."""
    (folder / "prepare.json").write_text(json.dumps({"version": 1, "plan": plan}))
    (folder / "store.json").rename(folder / "store.json.tmp")
    shard = sorted(folder.glob("*_train_*.bin"))[-1]
    shard.with_name(shard.name + ".tmp").write_bytes(shard.read_bytes()[:3])
    shard.unlink()


@pytest.mark.parametrize("beside", [None, "mine.bin"])
def test_an_unfinished_store_is_written_again_unless_a_foreign_file_stands_in_it(three, tmp_path, beside):
    prepare([three], tmp_path / "store", BYTES)
    whole = files(tmp_path / "store")
    make_unfinished(tmp_path / "store", plan_of([three], tmp_path / "store", BYTES))
    if beside:
        (tmp_path / "store" / beside).touch()
        before = state(tmp_path / "store")
        with pytest.raises(DataError, match=f"store/{beside}: .*not ours"):
            prepare([three], tmp_path / "store", BYTES)
        assert state(tmp_path / "store") == before
    else:
        prepare([three], tmp_path / "store", BYTES)
        assert files(tmp_path / "store") == whole


SCRIPT = """
import sys, multiprocessing, locale
multiprocessing.set_start_method("spawn")
from quatrain import prepare
from quatrain.tokens import shards
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.job import Job
{before}
config = PrepareConfig(tokenizer="bytes", val_docs=(0,), cross_dedup=False, shard_size=4, workers=2)
print(prepare([sys.argv[1]], sys.argv[2], config))
"""
KILLED_AT_THE_SECOND_PIECE = """
import os
add = shards.SplitWriter.add
def dying(self, piece):
    dying.calls += 1
    os._exit(9) if dying.calls == 2 else add(self, piece)
dying.calls = 0
shards.SplitWriter.add = dying
"""


def run_script(folder: Path, source: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Call `prepare` at the top level of a program of its own, into folder/store."""
    (folder / "script.py").write_text(SCRIPT.format(before=before))
    return subprocess.run(
        [sys.executable, str(folder / "script.py"), source, str(folder / "store")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_case_54_58_a_script_without_main_guard_under_the_c_locale_writes_the_same_store(tmp_path):
    source = str(tmp_path / "c.jsonl")
    Path(source).write_bytes('{"text": "val"}\n{"text": "é😀"}\n{"text": "two"}\n'.encode())
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    check = "assert 'utf' not in locale.getpreferredencoding(False).lower()"
    done = run_script(tmp_path, source, check, **c_locale)
    assert done.returncode == 0, done.stderr
    prepare([source], tmp_path / "here", replace(BYTES, shard_size=4))
    assert files(tmp_path / "store") == files(tmp_path / "here")
    assert texts_of(tmp_path / "store", "train") == ["é😀", "two"]


def test_the_same_command_after_a_kill_gives_the_store_of_an_undisturbed_run(three, tmp_path):
    assert run_script(tmp_path, three, KILLED_AT_THE_SECOND_PIECE).returncode == 9
    assert (tmp_path / "store" / "prepare.json").exists()
    with pytest.raises(DataError, match="an unfinished preparation; give its prepare command again"):
        TokenStore(tmp_path / "store")
    config = replace(BYTES, shard_size=4)
    prepare([three], tmp_path / "store", config)
    prepare([three], tmp_path / "undisturbed", config)
    assert files(tmp_path / "store") == files(tmp_path / "undisturbed")


def test_no_room_is_one_message_with_path_and_bytes_and_the_same_command_goes_on(three, tmp_path):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, limits[1]))  # a real refusal by the system, as by a full disk
    try:
        with pytest.raises(QuatrainError) as caught:
            prepare([three], tmp_path / "store", replace(BYTES, tokenizer="gpt2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == 1
    assert re.search(
        r"store/tokenizer.json: cannot write \d,\d{3},\d{3} bytes: File too large; make room", str(caught.value)
    )
    prepare([three], tmp_path / "store", replace(BYTES, tokenizer="gpt2"))
    assert texts_of(tmp_path / "store", "train") == ["two", "three"]


@pytest.mark.parametrize("size", [100_000, 600_000])  # seen when the buffer is flushed; seen in the write itself
def test_no_room_for_a_shard_is_one_message_with_path_and_bytes(tmp_path, size):
    import resource

    source = json_lines(tmp_path / "a.jsonl", "val", "a" * size)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        with pytest.raises(
            QuatrainError, match=r"s/parts/000000_000000.part: cannot write [\d,]+ bytes: File too large"
        ):
            prepare([source], tmp_path / "s", BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()  # an unclosed file is a ResourceWarning, and warnings are errors here
    prepare([source], tmp_path / "s", BYTES)
    assert TokenStore(tmp_path / "s").facts["splits"]["train"]["bytes"] == size


@pytest.mark.parametrize(
    ("texts", "rule"), [(["one", "two", None], {"val_fraction": 0.5}), (["one", "two"], {"val_tail": 0.1})]
)
def test_a_failed_preparation_closes_its_files_and_takes_them_back(tmp_path, texts, rule):
    source = json_lines(tmp_path / "a.jsonl", *texts)
    with pytest.raises(DataError):
        prepare([source], tmp_path / "s", PrepareConfig(tokenizer="bytes", **rule))
    assert not (tmp_path / "s").exists()
    gc.collect()


def test_an_interrupted_preparation_closes_its_files_and_can_go_on(three, tmp_path, monkeypatch):
    def interrupted(*rest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards.SplitWriter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare([three], tmp_path / "store", BYTES)
    gc.collect()
    prepare([three], tmp_path / "store", BYTES)
    assert texts_of(tmp_path / "store", "train") == ["two", "three"]


def test_two_preparations_of_one_folder_do_not_spoil_each_other(tmp_path, monkeypatch):
    source = json_lines(tmp_path / "a.jsonl", "one", "two", "three", "four")
    add, first_is_in, go_on = shards.SplitWriter.add, threading.Event(), threading.Event()
    main = threading.current_thread()

    def add_and_wait(self, document):
        add(self, document)
        if threading.current_thread() is not main:
            first_is_in.set()
            assert go_on.wait(20)

    monkeypatch.setattr(shards.SplitWriter, "add", add_and_wait)
    found = []

    def other():
        try:
            prepare([source], tmp_path / "s", BYTES)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    assert first_is_in.wait(20)
    try:
        with pytest.raises(UsageError, match=r"/s: another prepare is writing into it; wait for it, or stop it"):
            prepare([source], tmp_path / "s", BYTES)
    finally:
        go_on.set()
        thread.join()
    assert found == []
    assert list(TokenStore(tmp_path / "s").damaged()) == []
    names = {"a_train_000000.bin", "a_val_000000.bin", "a_train.idx", "a_val.idx", "tokenizer.json", "store.json"}
    assert set(files(tmp_path / "s")) == names


@pytest.mark.parametrize(("first", "seen"), [(1 << 18, True), (0, False)])
def test_a_fast_way_that_differs_stops_the_run_with_the_document_named(three, tmp_path, monkeypatch, first, seen):
    honest = ByteTokenizer.encode_batch

    def wrong(self, texts):
        ids, offsets = honest(self, texts)
        return ids ^ np.isin(ids, [ord("w")]).astype(np.uint32), offsets

    monkeypatch.setattr(ByteTokenizer, "encode_batch", wrong)
    monkeypatch.setattr(encoding, "CHECKED_AT_ONCE", first)
    monkeypatch.setattr(lines, "CHUNK", 1)
    monkeypatch.setattr(lines, "READ", 8)  # "two" is in the second batch
    if not seen:
        prepare([three], tmp_path / "store", BYTES)
        return
    with pytest.raises(QuatrainError, match=r":2: two tokenizers give different ids"):
        prepare([three], tmp_path / "store", BYTES)
