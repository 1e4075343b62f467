import gzip
import json
import os
import re
from pathlib import Path

import pytest

from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.job import Job
from quatrain.tokens.store import TokenStore
from test_cli import call, done, files_in, full_after, refused

KEYS = {
    "documents",
    "tokens",
    "train_tokens",
    "val_tokens",
    "empty",
    "duplicates",
    "surrogates",
    "seconds",
    "fingerprint",
}


@pytest.fixture(autouse=True)
def _corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [f"document {number}" for number in range(9)]
    Path("nine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    Path("one.txt").write_text("hello world\n" * 20, encoding="utf-8")


def prepare(*words: str) -> list[str]:
    return ["prepare", *words, "--out", "S", *([] if "--tokenizer" in words else ["--tokenizer", "char"])]


def test_json_is_the_last_line_of_stdout_and_people_read_stderr():
    answer = done(*prepare("nine.jsonl"), "--json")
    facts = answer.json
    assert answer.out.count("\n") == 1
    assert set(facts) >= KEYS
    assert facts["documents"] == 9
    assert facts["tokens"] == facts["train_tokens"] + facts["val_tokens"] == 9 * len("document 0") + 9 + 2
    assert facts["fingerprint"] == TokenStore("S").fingerprint
    assert "9 documents" in answer.err


def test_without_json_people_read_stdout():
    answer = done(*prepare("nine.jsonl"))
    assert "S: 9 documents" in answer.out
    assert answer.err == ""


def test_the_same_command_again_says_so_and_changes_nothing():
    first = done(*prepare("nine.jsonl"), "--json").json
    before = files_in(Path("S"))
    again = done(*prepare("nine.jsonl"), "--json")
    assert "already holds" in again.err
    assert files_in(Path("S")) == before
    assert again.json | {"seconds": 0} == first | {"seconds": 0}


def test_every_option_reaches_the_store():
    Path("more.txt").write_text("held out", encoding="utf-8")
    words = ["--val", "more.txt", "one.txt", "--shard-size", "50", "--workers", "2", "--seed", "7", "--name", "mine"]
    done(*prepare("nine.jsonl"), *words)
    store = TokenStore("S")
    assert store.facts["split"] == {"rule": "files"}
    assert store.facts["splits"]["val"]["documents"] == 2
    assert [shard["file"] for shard in store.facts["splits"]["train"]["shards"]] == [
        "mine_train_000000.bin",
        "mine_train_000001.bin",
    ]
    assert store.tokenizer.decode(store.val[:9].tolist()) == "<|endoftext|>held out"


@pytest.mark.parametrize(
    ("words", "held_out"),
    [(["--val-docs", "7"], [7]), (["--val-docs=0,7"], [0, 7]), (["--val-docs", "7,0,7"], [0, 7])],
)
def test_val_docs_are_zero_based_indices(words, held_out):
    done(*prepare("nine.jsonl"), *words)
    store = TokenStore("S")
    text = store.tokenizer.decode(store.val[:].tolist())
    assert text.split("<|endoftext|>") == ["", *(f"document {index}" for index in held_out), ""]


def test_val_tail_warns_that_it_splits_a_document():
    assert "splits a document at character 216 of 240" in done(*prepare("one.txt"), "--val-tail", "0.1").out


def test_sonnets_are_characters_and_everything_else_gpt2_unless_told():
    done("prepare", "corpus:sonnets", "--out", "A")
    done("prepare", "nine.jsonl", "--out", "B")
    assert [TokenStore(folder).facts["tokenizer"]["name"] for folder in "AB"] == ["char", "gpt2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "prepare needs a source: a file, a folder, a glob, or corpus:sonnets"),
        (["nope.txt"], "nope.txt: no such file or folder"),
        (["corpus:sonets"], "did you mean 'corpus:sonnets'?"),
        (["nine.jsonl", "--text-column", "txt"], "nine.jsonl:1: no column 'txt' (did you mean 'text'?)"),
        (["nine.jsonl", "--val", "nope.txt"], "nope.txt: no such file or folder"),
        (
            ["nine.jsonl", "--tokenizer", "gpt3"],
            "no tokenizer 'gpt3' (did you mean 'gpt2'?); there is char, bytes, gpt2",
        ),
        (["nine.jsonl", "--val-docs", "seven"], "--val-docs is 'seven', expected indices such as 7 or 3,5"),
        (["nine.jsonl", "--val-docs", "1.5"], "--val-docs is '1.5', expected indices"),
        (["nine.jsonl", "--val-docs", "a_b"], "--val-docs is 'a_b', expected indices"),
        (["nine.jsonl", "--val-docs", ""], "--val-docs is '', expected indices such as 7 or 3,5"),
        (["nine.jsonl", "--val-docs", ","], "--val-docs is ',', expected indices"),
        (
            ["nine.jsonl", "--eot", "my_sep"],
            "--eot is 'my_sep', and the tokenizer char has <|endoftext|>; leave it out",
        ),
        (["nine.jsonl", "--val-docs", "9"], "--val-docs names document 9, and there are 9 (0 to 8)"),
        (["nine.jsonl", "--val-docs=-1"], "--val-docs holds a negative index (-1)"),
        (["nine.jsonl", "--val-docs", "-1"], "--val-docs holds a negative index (-1)"),
        (
            ["nine.jsonl", "--val-docs", "0,1,2,3,4,5,6,7,8"],
            "the train split has no document (0 train, 9 val; the same text is always in the same split)",
        ),
        (
            ["nine.jsonl", "--val-fraction", "0"],
            "--val-fraction 0 holds nothing out; give --val-docs, --val-tail, validation files, or a fraction above 0",
        ),
        (["nine.jsonl", "--val-fraction", "1"], "--val-fraction is 1.0, it must be at least 0 and below 1"),
        (["nine.jsonl", "--val-fraction", "nan"], "--val-fraction is nan, it must be finite"),
        (["nine.jsonl", "--val-fraction=-0.1"], "--val-fraction is -0.1"),
        (["one.txt", "--val-tail", "1.5"], "--val-tail is 1.5"),
        (
            ["one.txt"],
            "cannot be split by documents: cut its end off with --val-tail 0.1",
        ),
        (
            ["nine.jsonl", "--val-tail", "0.1"],
            "--val-tail cuts one document, and there are 9; hold out whole documents",
        ),
        (["nine.jsonl", "nine.jsonl"], "nine.jsonl is the same file as nine.jsonl; name it once"),
        (
            ["nine.jsonl", "--val-docs", "1", "--val", "one.txt"],
            "--val-docs, --val-tail and validation files each decide the split; give one of them",
        ),
        (["nine.jsonl", "--seed", str(2**63)], f"--seed is {2**63}, it must be in 0 .. 2^63 - 1"),
        (["nine.jsonl", "--seed=-1"], "--seed is -1, it must be in 0 .. 2^63 - 1"),
        (["nine.jsonl", "--near-threshold", "0"], "--near-threshold is 0.0, it must be above 0 and at most 1"),
        (["nine.jsonl", "--near-threshold", "nan"], "--near-threshold is nan, it must be finite"),
        (["nine.jsonl", "--shuffle", "-1"], "--shuffle is -1, it must be in 0 .. 2^63 - 1"),
        (["nine.jsonl", "--shuffle", "x"], 'Invalid value for --shuffle: unable to convert "x" into int.'),
        (["nine.jsonl", "--max-ratio", "0.5"], "--max-ratio is 0.5, it must be at least 1"),
        (["nine.jsonl", "--max-line-bytes", "0"], "--max-line-bytes is 0, it must be at least 1"),
        (["nine.jsonl", "--max-document-bytes", "0"], "--max-document-bytes is 0, it must be at least 1"),
        (
            ["nine.jsonl", "--max-line-bytes", "5"],
            "nine.jsonl:1: a line of over 5 bytes; allow it with --max-line-bytes",
        ),
        (
            ["nine.jsonl", "--max-document-bytes", "5"],
            "nine.jsonl:1: a document of 10 bytes; allow it with --max-document-bytes",
        ),
        (["nine.jsonl", "--task", "x"], "--task is 'x', expected a number and how many there are, from 0/64 to 63/64"),
        (["nine.jsonl", "--task", "3/3"], "--task is '3/3', expected a number and how many there are"),
        (["nine.jsonl", "--task", "0/0"], "--task is '0/0', expected a number and how many there are"),
        (["nine.jsonl", "--task=-1/3"], "--task is '-1/3', expected a number and how many there are"),
        (["nine.jsonl", "--task", "0/100000"], "--task is '0/100000', expected a number and how many there are"),
        (
            ["nine.jsonl", "--task", "0/2", "--finish"],
            "--task does one share of the work; give it without --finish and --val-tail",
        ),
        (
            ["one.txt", "--task", "0/2", "--val-tail", "0.1"],
            "--task does one share of the work; give it without --finish and --val-tail",
        ),
        (
            ["nine.jsonl", "--finish"],
            "S: 1 units of the input are not tokenized yet; run the tasks first, such as --task 0/8, or leave --finish",
        ),
    ],
)
def test_wrong_input_is_exit_2_one_message_and_no_folder(words, expected):
    assert expected in refused(*prepare(*words))


def test_all_mistakes_are_told_at_once():
    told = refused(*prepare("nine.jsonl"), "--shard-size", "0", "--workers", "0", "--val-fraction", "2")
    assert told.startswith("error: 3 mistakes")
    for value in ("--shard-size is 0, it must be at least 1", "--workers is 0, ", "--val-fraction is 2.0"):
        assert value in told


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": 7}', "bad.jsonl:2: column 'text' holds a number, expected a string"),
        ('{"text": null}', "bad.jsonl:2: column 'text' holds null"),
        ("{text}", "bad.jsonl:2: not a line of JSON"),
        ("[1]", "bad.jsonl:2: expected a JSON object, found a list"),
    ],
)
def test_a_bad_line_is_named_and_leaves_no_store(line, expected):
    Path("bad.jsonl").write_text('{"text": "good"}\n' + line + "\n", encoding="utf-8")
    assert expected in refused(*prepare("bad.jsonl"))


def test_files_without_a_document_are_refused():
    Path("empty").mkdir()
    assert "no document files in empty" in refused(*prepare("empty"))
    Path("blank.jsonl").write_text('{"text": ""}\n\n', encoding="utf-8")
    assert "no document with text in blank.jsonl (1 empty)" in refused(*prepare("blank.jsonl"))
    Path("notes.md").write_text("x", encoding="utf-8")
    assert "notes.md: unknown kind of file; expected .txt, .jsonl, .parquet" in refused(*prepare("notes.md"))


@pytest.mark.parametrize("name", ["S/mine.txt", "S/store.bin", "S/sub/deep.txt"])
def test_a_folder_with_a_foreign_file_is_named_and_untouched(name):
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("dear", encoding="utf-8")
    assert f"S/{Path(name).parts[1]}: --out must be absent, empty or our own" in refused(*prepare("nine.jsonl"))


def test_an_out_that_is_a_file_is_refused():
    Path("S").write_text("dear", encoding="utf-8")
    assert "S: a file; --out must be a folder" in refused(*prepare("nine.jsonl"))


def test_a_finished_or_unfinished_store_of_another_request_is_refused_and_kept():
    done(*prepare("nine.jsonl"))
    assert "S: holds a finished store of other sources or options" in refused(*prepare("nine.jsonl"), "--seed", "1")
    os.unlink("S/store.json")
    Path("S/prepare.json").write_text(json.dumps({"plan": "another"}), encoding="utf-8")
    assert "S: holds an unfinished store of other sources or options" in refused(*prepare("nine.jsonl"), "--seed", "1")


def test_an_unfinished_store_of_the_same_request_is_finished_by_the_same_command():
    done(*prepare("nine.jsonl"))
    whole = files_in(Path("S"))
    Path("S/store.json").unlink()
    config = PrepareConfig(tokenizer="char")
    plan = Job.plan(["nine.jsonl"], Path("S"), config, lambda line: None).claim().plan
    Path("S/prepare.json").write_text(json.dumps({"plan": plan}), encoding="utf-8")
    Path("S/nine_train_000000.bin").write_bytes(b"cut")
    done(*prepare("nine.jsonl"))
    assert files_in(Path("S")) == whole


def test_an_empty_out_folder_is_taken():
    Path("S").mkdir()
    done(*prepare("nine.jsonl"))


def test_a_file_of_unknown_kind_in_a_folder_is_passed_over_and_said():
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("first", encoding="utf-8")
    Path("corpus/b.txt").write_text("second", encoding="utf-8")
    Path("corpus/notes.md").write_text("third", encoding="utf-8")
    answer = done(*prepare("corpus"))
    assert "passed over corpus/notes.md" in answer.out
    assert "2 documents" in answer.out


def test_a_source_whose_name_is_not_utf_8_is_prepared():
    Path("\udcff.txt").write_text("text " * 50, encoding="utf-8")
    facts = done(*prepare("\udcff.txt"), "--val-tail", "0.1", "--json").json
    assert facts["documents"] == 2
    assert TokenStore("S").facts["sources"][0]["name"] == "\ufffd.txt"


@pytest.mark.parametrize("writes", [0, 1, 4, 5, 8])
def test_a_full_disk_is_exit_1_with_path_and_bytes_and_the_same_command_goes_on(monkeypatch, writes):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after(writes))
        answer = call(*prepare("nine.jsonl"))
    assert answer.code == 1
    assert re.search(r"^error: S/\S+: cannot write [\d,]+ bytes: No space left on device", answer.err)
    assert not Path("S/store.json").exists()
    done(*prepare("nine.jsonl"))
    done("inspect", "S", "--verify")


BAD = {
    '{"text": 7}': "text is no string",
    '{"text": null}': "text is no string",
    "no": "not JSON",
    "[1]": "not JSON",
    '{"txt": "a"}': "no text",
    json.dumps({"text": "x" * 70}): "too long",
}


def test_skip_bad_counts_by_kind_and_tells_examples_with_their_places():
    lines = ['{"text": "one"}', *BAD, "", '{"text": ""}', '{"text": "two"}']
    Path("bad.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    answer = done(*prepare("bad.jsonl"), "--skip-bad", "--max-line-bytes", "60", "--json")
    assert answer.json["documents"] == 2
    assert answer.json["skipped"] == 7
    assert "7 documents that cannot be read (examples: quatrain inspect S)" in answer.err
    facts = TokenStore("S").facts
    assert facts["skipped"] == {"no text": 1, "not JSON": 2, "not UTF-8": 1, "text is no string": 2, "too long": 1}
    assert facts["sources"][0]["rows"] == 2 + 1 + 7
    told = {one["place"]: (one["kind"], one["reason"]) for one in facts["examples"]}
    expected = {f"bad.jsonl:{number}": ("skipped", kind) for number, kind in enumerate(BAD.values(), 2)}
    assert told == expected | {"bad.jsonl:11": ("skipped", "not UTF-8")}
    sentences = {one["place"]: one["text"] for one in facts["examples"]}
    assert sentences["bad.jsonl:2"] == "column 'text' holds a number, expected a string"
    assert sentences["bad.jsonl:6"].startswith("no column 'text' (did you mean 'txt'?); found: txt")
    assert sentences["bad.jsonl:7"] == "a line of over 60 bytes; allow it with --max-line-bytes"
    assert sentences["bad.jsonl:11"] == "not valid UTF-8 (invalid start byte at byte 10)"


def test_skip_bad_of_a_cut_file_keeps_what_is_whole_and_names_no_path():
    data = gzip.compress(b"".join(json.dumps({"text": f"text {number}"}).encode() + b"\n" for number in range(2000)))
    for name in ("here", "there"):
        Path(name).mkdir()
        Path(name, "a.jsonl.gz").write_bytes(data[:-9])
        done("prepare", f"{name}/a.jsonl.gz", "--out", f"{name}/S", "--tokenizer", "char", "--skip-bad")
    assert files_in(Path("here/S")) == files_in(Path("there/S"))
    facts = TokenStore("here/S").facts
    assert facts["skipped"] == {"truncated file": 1}
    assert facts["sources"][0]["rows"] == sum(facts["splits"][split]["documents"] for split in ("train", "val")) + 1
    (example,) = facts["examples"]
    assert example["place"] == f"a.jsonl.gz:{facts['sources'][0]['rows']}"
    assert example["text"] == "truncated: its .gz data stops before its end; copy it again"


def test_skip_bad_of_a_key_that_is_no_text_is_told_in_text():
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"\\ud800": 1}\n', encoding="utf-8")
    done(*prepare("bad.jsonl"), "--skip-bad")
    assert "found: \ufffd" in TokenStore("S").facts["examples"][0]["text"]


def test_a_file_named_twice_can_be_allowed():
    assert done(*prepare("nine.jsonl", "nine.jsonl"), "--allow-duplicates", "--json").json["documents"] == 18


def test_cross_dedup_and_shuffle_reach_the_store():
    text = "once more, with feeling, " * 9
    Path("near.jsonl").write_text("".join(json.dumps({"text": text + end}) + "\n" for end in ("", "!", " yes")))
    Path("far.jsonl").write_text("".join(json.dumps({"text": f"far {number}"}) + "\n" for number in range(9)))
    words = prepare("near.jsonl", "far.jsonl", "--val-docs", "0")
    answer = done(*words, "--json")
    assert answer.json["near_validation"] == 2
    assert "2 documents too much like validation" in answer.err
    removal = TokenStore("S").facts["removal"]
    assert removal == {"exact": True, "near": False, "cross": True, "threshold": 0.6, "benchmark": None}
    words[words.index("S")] = "T"
    assert done(*words, "--no-cross-dedup", "--shuffle", "7", "--json").json["documents"] == 12
    assert TokenStore("T").facts["removal"] == removal | {"cross": False}
    assert TokenStore("T").facts["shuffle"] == 7


def test_tasks_tell_what_they_did_and_finish_makes_the_store():
    Path("more.jsonl").write_text("".join(json.dumps({"text": f"more {number}"}) + "\n" for number in range(9)))
    words = prepare("nine.jsonl", "more.jsonl")
    assert re.fullmatch(r"S: task 1/2 is done, 0 units in \d+\.\d s\n", done(*words, "--task", "1/2").out)
    told = done(*words, "--task", "0/2", "--json").json
    assert told | {"seconds": 0} == {"task": 0, "of": 2, "units": 1, "seconds": 0}
    finished = done(*words, "--finish", "--json").json
    assert finished["documents"] == 18
    assert set(files_in(Path("S"))) == {
        "nine_train_000000.bin",
        "nine_train.idx",
        "nine_val_000000.bin",
        "nine_val.idx",
        "tokenizer.json",
        "store.json",
    }
    assert "S already holds the store of this request" in done(*words, "--task", "0/2").out
