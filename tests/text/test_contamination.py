"""A text is found if 13 of its words in a row stand in a benchmark, as plain Python would find them."""

import gzip
import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from conftest import shared_file
from quatrain.errors import DataError
from quatrain.text import contamination
from quatrain.text.contamination import WORDS, Benchmark

ITEM = "The quick brown fox jumps over the lazy dog, and 13 times it ran away!"  # 15 words


def words(text: bytes) -> list[bytes]:
    return re.findall(rb"[0-9a-z\x80-\xff]+", text.lower())


def runs(text: bytes) -> set[tuple[bytes, ...]]:
    found = words(text)
    return {tuple(found[place : place + WORDS]) for place in range(len(found) - WORDS + 1)}


@pytest.fixture
def benchmark_of(tmp_path):
    """A benchmark from items, written as JSON lines."""

    def build(*items: dict) -> Benchmark:
        path = tmp_path / "items.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        return Benchmark([str(path)])

    return build


# Few short words and a few long ones (8 bytes and 9, 16 and 17 are where the way of hashing changes), many separators.
WORD = st.sampled_from(["a", "b", "A", "B", "0", "é", "Éa", "x" * 8, "x" * 9, "y" * 16, "y" * 17, "z" * 300])
TEXT = st.lists(st.tuples(WORD, st.sampled_from([" ", " ", " ", "", "\n", "-", ". ", "\0", "'"])), max_size=60).map(
    lambda parts: "".join(word + separator for word, separator in parts)
)


@given(items=st.lists(TEXT, min_size=1, max_size=3), texts=st.lists(TEXT, max_size=5), block=st.integers(1, 40))
def test_the_runs_of_plain_python_are_found(tmp_path_factory, items, texts, block):
    path = tmp_path_factory.mktemp("items") / "items.jsonl"
    path.write_text("".join(json.dumps({"text": item}) + "\n" for item in items), encoding="utf-8")
    known = set().union(*(runs(item.encode()) for item in items))
    texts = [text.encode() for text in texts + items]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contamination, "BLOCK", block)
        benchmark = Benchmark([str(path)])
        found = benchmark.found_in(texts)
    assert benchmark.describe()[0]["grams"] == len(known)
    assert (found.dtype, found.tolist()) == (np.bool_, [bool(runs(text) & known) for text in texts])
    for text in texts:
        all_words = words(text)
        matches = [all_words[place : place + WORDS] for place in range(len(all_words) - WORDS + 1)]
        first = next((match for match in matches if tuple(match) in known), [])
        assert benchmark.matched(text) == b" ".join(first).decode()


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_any_bytes_are_a_text(hellaswag_like, texts):
    expected = [bool(runs(text) & runs(ITEM.encode())) for text in texts]
    assert hellaswag_like.found_in(texts).tolist() == expected
    joined = b" ".join([*texts, ITEM.encode()])
    assert hellaswag_like.found_in([joined]).tolist() == [True]


@pytest.fixture(scope="module")
def hellaswag_like(tmp_path_factory) -> Benchmark:
    path = tmp_path_factory.mktemp("items") / "items.jsonl"
    path.write_text(json.dumps({"text": ITEM}), encoding="utf-8")
    return Benchmark([str(path)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ITEM, True),
        ("THE QUICK, brown\nfox -- jumps over 'the lazy dog'; and (13) times it", True),
        ("so the quick brown fox jumps over the lazy dog and 13 times he ran away", False),
        ("quick brown fox jumps over the lazy dog and 13 times it", False),  # 12 words
        ("quick brown fox jumps over the lazy dog and 13 times it ran", True),
        ("The quick brown fox jumps over the lazydog, and 13 times it ran away", False),
        ("The quick brown fox jumps over the lazy dog, and 13 times ït ran away", False),
        ("", False),
    ],
)
def test_words_are_lower_case_and_without_punctuation(hellaswag_like, text, found):
    assert hellaswag_like.found_in([text.encode()]).tolist() == [found]
    assert (hellaswag_like.matched(text.encode()) != "") == found


def test_the_match_is_shown(hellaswag_like):
    text = b'He said: "The quick BROWN fox jumps over the lazy dog, and 13 times it ran'
    assert hellaswag_like.matched(text) == "the quick brown fox jumps over the lazy dog and 13 times it"


def test_no_run_crosses_from_one_text_to_the_next(hellaswag_like):
    halves = [ITEM[:30].encode(), ITEM[30:].encode()]
    assert hellaswag_like.found_in(halves).tolist() == [False, False]
    assert hellaswag_like.found_in([b" ".join(halves)]).tolist() == [True]
    assert hellaswag_like.found_in([ITEM.encode(), b"", halves[0], ITEM.encode()]).tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert hellaswag_like.found_in([]).tolist() == []


def test_every_string_of_an_item_is_a_text(benchmark_of):
    texts = [f"{name} " + " ".join(f"{name}{place}" for place in range(13)) for name in "abcdef"]
    benchmark = benchmark_of(
        {"question": texts[0], "choices": [texts[1], [texts[2], {"why": texts[3]}]], "label": 3, "none": None},
        {"id": {"deep": {"deeper": [[[texts[4]]]]}}},
    )
    assert benchmark.found_in([text.encode() for text in texts]).tolist() == [True] * 5 + [False]


def test_a_context_and_each_ending_are_one_passage(benchmark_of):
    context, endings = "one two three four five six seven", ["A B C D E F G", "h i j k l m n"]
    benchmark = benchmark_of({"ctx": context, "endings": endings, "label": 0})
    texts = [f"{context}, {ending}." for ending in [*endings, "o p q r s t u"]] + [" ".join(endings)]
    assert benchmark.found_in([text.encode() for text in texts]).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "item", [{"ctx": 5, "endings": ["a"]}, {"ctx": "a", "endings": "b"}, {"ctx": "a", "endings": [1]}]
)
def test_a_context_of_another_kind_is_no_error(benchmark_of, item):
    assert benchmark_of(item).describe()[0]["items_without_grams"] == 1


def test_items_that_are_too_short_are_counted(benchmark_of):
    facts = benchmark_of({"text": ITEM}, {"text": "too short"}, {"label": 1}, {"text": ITEM}).describe()
    assert [(one["items"], one["items_without_grams"], one["grams"]) for one in facts] == [(4, 2, 3)]


def test_batches_of_items_leave_no_seam(benchmark_of, monkeypatch):
    items = [{"text": f"{number} {ITEM} {number}"} for number in range(7)] + [{"text": "short"}]
    whole = benchmark_of(*items).describe()
    monkeypatch.setattr(contamination, "ITEMS", 2)
    assert benchmark_of(*items).describe() == whole


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_files_are_described(tmp_path, compression):
    data = b"\n" + json.dumps({"text": ITEM}).encode() + b"\r\n\n"
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression](data)
    path = tmp_path / f"test.jsonl{compression}"
    path.write_bytes(packed)
    benchmark = Benchmark([str(path)])
    assert benchmark.describe() == [
        {
            "name": path.name,
            "sha256": hashlib.sha256(packed).hexdigest(),
            "items": 1,
            "items_without_grams": 0,
            "grams": 3,
        }
    ]
    assert benchmark.found_in([ITEM.encode()]).all()


def test_several_files_are_one_benchmark(tmp_path):
    for name, text in (("a", ITEM), ("b", ITEM.replace("fox", "cat"))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    benchmark = Benchmark([str(tmp_path)])
    assert [file["name"] for file in benchmark.describe()] == ["a.jsonl", "b.jsonl"]
    assert benchmark.found_in([ITEM.encode(), ITEM.replace("fox", "cat").encode()]).all()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not a line of JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a\.jsonl:2: expected a JSON object, found a list"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not valid UTF-8"),
        ("a.jsonl", b"\n", r"a\.jsonl: no benchmark items; expected one JSON object a line"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], r"a\.jsonl\.gz: truncated"),
        ("a.txt", b"text", r"a\.txt: expected benchmark items as JSON lines"),
        ("a.csv", b"text", r"a\.csv: unknown kind of file"),
    ],
)
def test_what_is_no_benchmark_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        Benchmark([str(tmp_path / name)])


def test_lone_surrogates_in_items_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800 ' + ITEM + '"}')
    assert Benchmark([str(tmp_path / "a.jsonl")]).found_in([ITEM.encode()]).all()


def test_threads_share_one_benchmark(hellaswag_like):
    batches = [[ITEM.encode() if place % step == 0 else b"x " * 500 for place in range(100)] for step in range(1, 9)]
    with ThreadPoolExecutor(8) as threads:
        for batch, found in zip(batches, threads.map(hellaswag_like.found_in, batches), strict=True):
            assert found.tolist() == [text[:1] == b"T" for text in batch]


def test_hellaswag_is_found_in_a_text_that_quotes_it():
    benchmark = Benchmark([str(shared_file("hellaswag_val.jsonl.gz"))])
    with gzip.open(shared_file("hellaswag_val.jsonl.gz"), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:500]
    quotes = [f"Somebody wrote: {row['ctx']} {row['endings'][int(row['label'])]}".encode() for row in rows]
    long_enough = [len(words(quote)) >= WORDS + 2 for quote in quotes]
    assert benchmark.found_in(quotes).tolist() == long_enough
    assert not benchmark.found_in([b" ".join(reversed(quote.split())) for quote in quotes]).any()
