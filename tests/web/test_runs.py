import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_runs import tiny_run

from quatrain.tokens.store import TokenStore
from quatrain.training.metrics import JsonLines
from quatrain.web import runs
from quatrain.web.runs import NotHere, describe, named, open_store, read_rows


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_rows_of_a_file_that_grows_are_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path).rows == []
    path.write_bytes(lines({"step": 1, "loss": 2.5}) + b'{"step": 2, "lo')
    first = read_rows(path)
    assert [row["step"] for row in first.rows] == [1]
    with path.open("ab") as file:
        file.write(b'ss": 2.25}\n' + lines({"step": 3, "loss": 2.0}))
    second = read_rows(path, first.next, first.mark)
    assert [(row["step"], row["loss"]) for row in second.rows] == [(2, 2.25), (3, 2.0)]
    assert second.start == first.next
    third = read_rows(path, second.next, second.mark)
    assert (third.rows, third.start, third.next) == ([], second.next, path.stat().st_size)


@given(st.lists(st.floats(-1e6, 1e6), max_size=12), st.lists(st.integers(0, 400), max_size=6))
def test_every_way_of_growing_gives_the_same_rows(tmp_path_factory, losses, cuts):
    path = tmp_path_factory.mktemp("grows") / "metrics.jsonl"
    content = lines(*({"step": step, "loss": loss} for step, loss in enumerate(losses)))
    found, after, mark = [], 0, ""
    for cut in [*sorted(cuts), len(content)]:
        path.write_bytes(content[:cut])
        told = read_rows(path, after, mark)
        assert told.start == after
        found, after, mark = found + told.rows, told.next, told.mark
    assert [row["loss"] for row in found] == losses


@pytest.mark.parametrize("others", [[], [{"step": 2, "loss": 1.5}], [{"step": 2, "loss": 1.5}] * 9])
def test_a_file_that_a_resume_cut_is_read_from_its_start(tmp_path, others):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines({"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}))
    before = read_rows(path)
    path.write_bytes(lines({"step": 1, "loss": 2.5}, *others))
    told = read_rows(path, before.next, before.mark)
    assert told.start == 0
    assert [row["step"] for row in told.rows] == [1, *(row["step"] for row in others)]


GOOD = json.dumps({"step": 1, "loss": 2.5}).encode() + b"\n"
BAD = [b"[1]\n", b"nothing\n", b'{"step": "x"}\n', b"\xff\n", b'{"step": 2, "loss": NaN}\n', GOOD[:-1], GOOD[:9]]


@given(st.lists(st.sampled_from([GOOD, GOOD, GOOD, *BAD]), max_size=8))
def test_page_and_inspect_read_the_same_rows_up_to_the_first_that_is_not_whole(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("damaged") / "metrics.jsonl"
    path.write_bytes(b"".join(parts))
    whole = [part == GOOD for part in parts]
    told = read_rows(path)
    assert told.rows == JsonLines(path).rows()
    assert len(told.rows) == (whole.index(False) if False in whole else len(whole))
    assert (told.next, told.more) == (len(told.rows) * len(GOOD), False)


def test_a_long_file_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "AT_ONCE", 256)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(lines(*({"step": step, "text": "x" * (900 if step == 3 else 50)} for step in range(9))))
    found, told = [], read_rows(path)
    while told.rows:
        found += [row["step"] for row in told.rows]
        assert told.more or told.next == path.stat().st_size
        told = read_rows(path, told.next, told.mark)
    assert found == list(range(9))


def test_names_are_the_shortest_that_differ_and_hold_no_path(tmp_path):
    folders = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "y", tmp_path / "b" / ".." / "y"]
    for folder in folders[:3]:
        folder.mkdir(parents=True)
    found = named(folders)
    assert list(found) == ["a/x", "b/x", "y"]
    assert found["y"] == (tmp_path / "y").resolve()


@pytest.fixture(scope="module")
def run(sonnets: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(sonnets, tmp_path_factory.mktemp("runs") / "tiny")


def test_a_run_is_described_by_its_recipe_checkpoints_and_store(run, sonnets):
    told = describe("tiny", run)
    assert told["checkpoints"] == [10, 20, 30]
    assert (told["steps"], told["seq_len"], told["vocab_size"]) == (30, 64, 56)
    stored = load_file(run / "checkpoints" / "step_00000030" / "model.safetensors")
    assert told["parameters"] == sum(weight.numel() for weight in stored.values())
    assert told["flops_per_token"] == 6 * (told["parameters"] - 64 * 32) + 12 * 64 * 32  # without the positions
    assert str(run) not in json.dumps(told)
    docs = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")
    assert sorted(told) == sorted(re.search(r"`runs`: ([\w, ]+) \|", docs)[1].split(", "))


def test_bits_per_byte_of_the_page_are_those_of_evaluate(run, sonnets):
    from quatrain.commands.evaluate import evaluate

    exact = evaluate(run)
    page = exact["loss"] / math.log(2) / describe("tiny", run)["bytes_per_token"]
    assert page == pytest.approx(exact["bits_per_byte"], rel=1e-9)


def test_a_checkpoint_stands_for_its_run(run):
    assert named([run / "checkpoints" / "step_00000020", run]) == {"tiny": run.resolve()}


def test_a_run_without_recipe_or_store_is_shown_as_far_as_it_goes(tmp_path):
    told = describe("new", tmp_path / "new")
    assert told["checkpoints"] == []
    assert (told["steps"], told["store"], told["bytes_per_token"]) == (None, "store", None)
    with pytest.raises(NotHere, match="'store', cannot be read"):
        open_store(tmp_path / "new")


def test_a_store_that_moved_is_told_without_its_path(run, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    recipe = (run / "recipe.toml").read_text()
    (moved / "recipe.toml").write_text(recipe.replace('/store"', '/gone"'))
    with pytest.raises(NotHere, match="'gone', cannot be read on this machine") as caught:
        open_store(moved)
    assert str(tmp_path.parent) not in str(caught.value)
