import pytest

from quatrain.tokens import sentences


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"rule": "hash", "fraction": 0.005, "seed": 1337}, "hash of text and seed 1337 is below 0.5%"),
        ({"rule": "documents", "indices": [7, 9]}, "documents 7, 9 (counted from 0)"),
        ({"rule": "files"}, "the files given with --val"),
        ({"rule": "tail", "share": 0.1}, "the last 10% of one document"),
        ({"rule": "names", "pattern": "val"}, "rule names, pattern val"),
        ("by file name", "by file name"),
        (None, "not written down"),
    ],
)
def test_a_rule_in_words(rule, expected):
    assert expected in sentences.split_rule({"split": rule})


STORE = {
    "counts": {"empty": 1, "duplicates": 0, "near_duplicates": 12, "skipped": 3, "surrogates": 9, "new_kind": 2},
    "skipped": {"not a line of JSON": 2, "not UTF-8": 1},
    "splits": {"val": {"share_in_train": 0.0123}},
    "examples": [
        {"kind": "near_duplicate", "place": "b.jsonl:3", "like": "a.jsonl:1", "jaccard": 0.875, "text": "Hello"},
        {"kind": "skipped", "place": "b.jsonl:9", "like": "", "jaccard": None, "text": "{"},
    ],
    "removal": {"exact": True, "near": True, "cross": False, "threshold": 0.8},
    "shuffle": 5,
}


def test_what_was_left_out():
    assert sentences.left_out(STORE) == [
        ("empty", 1),
        ("near-duplicates", 12),
        ("could not be read", 3),
        ("  not a line of JSON", 2),
        ("  not UTF-8", 1),
        ("new kind", 2),
    ]
    assert list(sentences.remarks(STORE)) == [
        "9 lone surrogates became U+FFFD",
        "1.23% of sampled 32-token validation spans stand word for word in train",
    ]
    assert list(sentences.looked_for(STORE)) == [
        "looked for exact duplicates, near-duplicates (near: Jaccard similarity from 0.8)",
        "documents shuffled with seed 5",
    ]
    first, second = sentences.examples(STORE)
    assert first == {
        "kind": "near-duplicate", "place": "b.jsonl:3", "like": "a.jsonl:1 (Jaccard 0.88)", "text": "Hello"
    }  # fmt: skip
    assert (second["kind"], second["like"]) == ("skipped", "")


def test_a_store_of_another_writer_lacks_most_of_it():
    bare = {"splits": {"val": {}}}
    assert sentences.left_out(bare) == list(sentences.remarks(bare)) == []
    assert list(sentences.looked_for(bare)) == list(sentences.examples(bare)) == []
    nothing = bare | {"removal": {"exact": False, "near": False, "cross": False, "threshold": 0.8}, "shuffle": None}
    assert list(sentences.looked_for(nothing)) == [
        "no duplicates were looked for",
        "documents in the order of the sources",
    ]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (10**6, "1.0 MB"),
        (2 * 10**15, "2,000.0 TB"),
    ],
)
def test_sizes(count, expected):
    assert sentences.size(count) == expected
