import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from quatrain.tokens.store import TokenStore
from test_cli import TINY, done, refused

KEYS = {"loss", "perplexity", "bits_per_byte", "tokens", "seq_len", "packing", "fingerprint"}


@pytest.fixture(scope="module")
def trained(sonnets, tmp_path_factory):
    """A tiny run on the sonnets."""
    run = tmp_path_factory.mktemp("evaluate") / "run"
    done("train", "sonnets", "--data", sonnets.folder, "--out", run, *TINY)
    return run


@pytest.fixture(autouse=True)
def run(trained, tmp_path, monkeypatch):
    """A copy of it that a test may damage, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    return Path("run")


def test_two_evaluations_give_the_same_json_of_the_whole_split(sonnets):
    answer = done("evaluate", "run", "--json")
    facts = answer.json
    assert answer.out.count("\n") == 1
    assert set(facts) >= KEYS
    assert (facts["tokens"], facts["seq_len"], facts["packing"]) == (len(sonnets.val) - 1, 16, "concat")
    assert facts["fingerprint"] == sonnets.fingerprint
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))
    bits = facts["loss"] * facts["tokens"] / math.log(2)
    assert facts["bits_per_byte"] == pytest.approx(bits / sonnets.facts["splits"]["val"]["bytes"])
    assert done("evaluate", "run", "--json").out == answer.out


def test_people_are_told_what_the_number_was_measured_on(sonnets):
    told = done("evaluate", "run").out
    for fact in ("586 targets of val (the whole split)", "rows of 16, concat", sonnets.fingerprint[:16]):
        assert fact in told
    assert "the nats of the eots counted" in told


def test_the_loss_is_the_last_validation_of_the_run(run):
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert done("evaluate", "run", "--json").json["loss"] == json.loads(lines[-1])["val_loss"]


def test_a_text_file_is_scored_with_the_runs_tokenizer_and_its_hash_told():
    Path("mine.txt").write_text("shall i compare thee to a summer's day", encoding="utf-8")
    answer = done("evaluate", "run", "--text", "mine.txt", "--by-position", "--json")
    facts = answer.json
    assert (facts["tokens"], facts["bytes"], facts["split"], facts["fingerprint"]) == (39, 38, None, None)
    assert set(facts) >= KEYS
    assert "39 targets of mine.txt (the whole file), rows of 16" in answer.err
    assert facts["data_hash"][:16] in answer.err
    assert f"± {facts['standard_errors']['loss']:.4f} nats per token" in answer.err
    for row in facts["by_position"]:
        assert f"{row['loss']:.4f}" in answer.err


LINES = [{"context": "shall i", "endings": ["go", "stay"], "label": n % 2} for n in range(6)]


def test_tasks_stand_beside_the_loss_each_with_what_it_depends_on(run):
    Path("mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    answer = done("evaluate", "run", "--task", "mine.jsonl", "--items", "4", "--json")
    task = answer.json["tasks"]["mine.jsonl"]
    assert answer.json["loss"] == done("evaluate", "run", "--json").json["loss"]
    assert (task["count"], task["context_length"]) == (4, 16)
    assert set(task["scores"]) == {"own_acc", "own_mean", "own_acc_norm"}
    for name, score in task["scores"].items():
        assert set(score) == {"value", "standard_error", "count", "method", "context_length", "data_hash"}
        assert f"{name:20} {score['value']:.4f} ± {score['standard_error']:.4f}" in answer.err
        assert score["method"] in answer.err
    assert task["scores"]["own_acc"]["value"] == 0.5  # the same question with either label
    assert not (run / "evaluating").exists()


def test_a_task_needs_no_store(run):
    Path("mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    shutil.copytree(run / "checkpoints" / "step_00000006", "alone")
    facts = done("evaluate", "alone", "--task", "mine.jsonl", "--json").json
    assert facts["tasks"]["mine.jsonl"]["count"] == 6
    assert [facts[key] for key in sorted(KEYS)] == [None] * len(KEYS)


def test_probes_stand_beside_the_loss_each_with_what_it_depends_on(run):
    answer = done("evaluate", "run", "--probes", "--items", "4", "--json")
    probes = answer.json["probes"]
    assert answer.json["loss"] == done("evaluate", "run", "--json").json["loss"]
    assert (probes["rows"], probes["context_length"], probes["precision"]) == (4, 16, "fp32")
    assert set(probes["scores"]) == {"induction", "pattern", "lookup", "echo"}
    assert f"data {probes['data_hash'][:16]}" in answer.err
    for settings in probes["scores"].values():
        for setting, scores in settings.items():
            line = next(line for line in answer.err.splitlines() if scores_hash(scores) in line)
            assert line.split("  ")[1] == setting
            for score in scores.values():
                assert f"{score['value']:.4f} ± {score['standard_error']:.4f} ({score['baseline']:.4f})" in line
                assert f"{score['count']:,}" in line or score["count"] == 4
                assert score["method"].partition(": ")[2] in answer.err
    assert done("evaluate", "run", "--probes", "--items", "4", "--json").out == answer.out
    assert done("evaluate", "run", "--json").json["probes"] is None


def scores_hash(scores):
    (found,) = {score["data_hash"][:16] for score in scores.values()}
    return found


def test_probes_need_no_store_and_name_what_does_not_fit(run):
    shutil.copytree(run / "checkpoints" / "step_00000006", "alone")
    answer = done("evaluate", "alone", "--probes", "--items", "1", "--seq-len", "3", "--json")
    assert [answer.json[key] for key in sorted(KEYS)] == [None] * len(KEYS)
    probes = answer.json["probes"]
    assert list(probes["scores"]) == ["pattern"]
    assert probes["scores"]["pattern"]["0 shots"]["choice"]["standard_error"] is None
    assert probes["left_out"]["induction"] == {"gap 2": "longer than the context of 3 ids"}
    assert "left out: induction, gap 2: longer than the context of 3 ids" in answer.err
    assert "left out: echo, 0 shots; 1 shot; 2 shots; 4 shots" in answer.err


def test_one_checkpoint_folder_is_evaluated_as_the_run_is():
    newest = done("evaluate", "run/checkpoints/step_00000006", "--json").json
    assert newest == done("evaluate", "run", "--json").json
    assert done("evaluate", "run/checkpoints/step_00000003", "--json").json["loss"] != newest["loss"]


def test_a_shorter_pass_says_so():
    answer = done("evaluate", "run", "--max-tokens", "20", "--json")
    assert (answer.json["tokens"], answer.json["bits_per_byte"] is None) == (20, False)
    assert "20 targets of val (at most 20 asked for)" in answer.err


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["--split", "train"], "tokens", 4377),
        (["--seq-len", "8"], "seq_len", 8),
        (["--packing", "document"], "packing", "document"),
        (["--packing", "best_fit"], "packing", "best_fit"),
        (["--packing", "pad", "--seq-len", "9"], "tokens", 586),
        (["--precision", "bf16"], "precision", "bf16"),
        (["--stride", "4"], "stride", 4),
    ],
)
def test_what_is_chosen_stands_beside_the_score(words, key, expected):
    assert done("evaluate", "run", *words, "--json").json[key] == expected


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_taken(run):
    weights = run / "checkpoints" / "step_00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    answer = done("evaluate", "run", "--json")
    assert "step_00000006: model.safetensors is not what its manifest says" in answer.err
    assert answer.json["checkpoint"] == "run/checkpoints/step_00000003"


def test_a_checkpoint_outside_a_run_needs_data(run, sonnets):
    shutil.copytree(run / "checkpoints" / "step_00000006", "alone")
    assert "name a store with --data" in refused("evaluate", "alone")
    facts = done("evaluate", "alone", "--data", sonnets.folder, "--json").json
    assert facts["loss"] == done("evaluate", "run", "--json").json["loss"]


def test_case_59_a_store_of_another_tokenizer_is_refused():
    done("prepare", "corpus:sonnets", "--tokenizer", "bytes", "--val-docs", "7", "--out", "other")
    told = refused("evaluate", "run", "--data", "other")
    assert "other was made with another tokenizer than run/checkpoints/step_00000006" in told


def test_other_data_of_the_same_tokenizer_show_their_fingerprint(sonnets):
    done("prepare", "corpus:sonnets", "--val-docs", "0", "--out", "other")
    facts = done("evaluate", "run", "--data", "other", "--json").json
    assert facts["fingerprint"] == TokenStore("other").fingerprint != sonnets.fingerprint


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nope"], "nope: no such run or checkpoint folder"),
        (["run", "--data", "nope"], "nope: no such folder; make a token store with"),
        (["run", "--seq-len", "17"], "--seq-len is 17, it must be in 1 .. block_size 16"),
        (["run", "--seq-len", "-1"], "--seq-len is -1"),
        (["run", "--seq-len", "0"], "--seq-len is 0, it must be in 1 .. block_size 16"),
        (["run", "--max-tokens", "0"], "--max-tokens is 0, it must be at least 1"),
        (["run", "--stride", "17"], "--stride is 17, it must be in 1 .. seq_len 16"),
        (["run", "--stride", "4", "--packing", "pad"], "--stride goes with --packing concat alone, not pad"),
        (["run", "--text", "nope.txt"], "nope.txt"),
        (["run", "--text", "a.txt", "--data", "b"], "--text a.txt and --data b: one of them is scored"),
        (["run", "--text", "a.txt", "--split", "val"], "--text a.txt is scored whole and has no split"),
        (["run", "--task", "nope"], "no task 'nope'"),
        (["run", "--probes", "--items", "0"], "--items is 0, it must be at least 1"),
        (["run", "--items", "0"], "--items is 0, it must be at least 1"),
        (["run", "--file", "a.jsonl"], "--file a.jsonl goes with one --task"),
        (["run", "--device", "tpu"], "device 'tpu' is not on this machine"),
        (["run", "--split", "test"], 'Choose from: "val", "train"'),
        (["run", "--packing", "tight"], 'Choose from: "concat", "document"'),
        (["run", "--seqlen", "8"], "did you mean '--seq-len'?"),
    ],
)
def test_wrong_input_is_exit_2_and_one_message(words, expected):
    assert expected in refused("evaluate", *words)


def test_a_run_without_a_whole_checkpoint_is_refused(run):
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    shutil.rmtree(run / "checkpoints" / "step_00000003")
    answer = refused("evaluate", "run")
    assert "no whole checkpoint in this run; give its train command again" in answer


# Over several processes


def test_two_ranks_print_once_what_one_process_prints(run):
    """Groups too; scores of tasks are equal to the bit, sums over a split to rounding."""
    lines = [line | {"group": f"group{n % 4}"} for n, line in enumerate(LINES * 25)]
    Path("mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = ("evaluate", "run", "--split", "train", "--task", "mine.jsonl", "--json")
    expected = done(*words)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "quatrain", *words]
    ranks = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": rank}, stdout=PIPE, stderr=PIPE, text=True)
        for rank in ("0", "1")
    ]
    (first, told), other = (rank.communicate(timeout=60) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], told + other[1]
    assert other == ("", "")
    assert told == expected.err
    facts = json.loads(first)
    assert facts["tasks"] == expected.json["tasks"]
    assert len(facts["tasks"]["mine.jsonl"]["scores"]) == 7
    assert facts["loss"] == pytest.approx(expected.json["loss"], rel=1e-12)
    assert facts["tokens"] == expected.json["tokens"] > 4000
    assert not (run / "evaluating").exists()


def test_ranks_that_cannot_find_each_other_are_told_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is set, and the ranks do not find each other; use torchrun" in refused("evaluate", "run")
