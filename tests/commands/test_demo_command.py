import dataclasses
import math
import re
from pathlib import Path

import pytest

from quatrain.commands.demo import MARK
from quatrain.recipes.named import sonnets as full_recipe
from test_cli import done, files_in, refused

KEYS = {"first_loss", "train_loss", "val_loss", "best_val_loss", "best_step", "samples", "seconds"}


@pytest.fixture(autouse=True)
def _a_short_demo(tmp_path, monkeypatch):
    """The demo's own recipe, but of a few steps of a small model, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    config = full_recipe().config
    config = config.with_values("optim", warmup=2, lr=0.05)
    config = config.with_values("data", seq_len=16)
    config = config.with_values("model", n_layer=1, n_head=2, n_embd=16, block_size=16)
    few = {"steps": 12, "eval_every": 4, "save_every": 0, "samples": 1, "sample_tokens": 2}
    config = config.with_values("train", tokens_per_step=128, micro_batch=8, **few)
    short = dataclasses.replace(full_recipe(), config=config)
    monkeypatch.setattr("quatrain.recipes.named.sonnets", lambda: short)


def test_it_says_what_the_corpus_is_what_was_learned_and_that_it_overfits():
    told = " ".join(done("demo").out.split())
    assert "8 documents, 4,955 characters, 55 distinct ones + eot = 56 ids" in told
    assert f"a loss of ln 56 = {math.log(56):.3f}" in told
    match = re.search(r"train loss ([\d.]+), but ([\d.]+) nats per character on sonnet 116 \(([\d.]+) bits", told)
    assert match
    best = re.search(r"best validation loss was ([\d.]+), at step (\d+) of 12; from there on it overfits", told)
    assert best
    assert float(best[1]) <= float(match[2])
    assert "not learned" in told
    assert "train o sonnet 116" in told  # the legend of the curves
    assert "from a bare eot" in told


def test_json_has_both_losses_and_the_best_step_and_the_first_loss_is_near_ln_v():
    answer = done("demo", "--out", "here", "--json")
    facts = answer.json
    assert answer.out.count("\n") == 1
    assert set(facts) >= KEYS
    assert math.log(56) - 0.03 < facts["first_loss"] < math.log(56) + 0.15
    assert facts["best_val_loss"] <= facts["val_loss"]
    assert facts["best_step"] in (0, 4, 8, 12)
    assert len(facts["samples"]) == 3
    assert "4. sample" in answer.err


def test_it_leaves_a_run_and_its_store_that_the_other_commands_take():
    facts = done("demo", "--json").json
    scored = done("evaluate", "runs/sonnets", "--json").json
    assert scored["loss"] == pytest.approx(facts["val_loss"])
    assert done("inspect", "runs/sonnets/store", "--verify")
    assert done("sample", "runs/sonnets", "--max-tokens", "3")


def test_a_second_demo_starts_afresh_in_its_own_folder():
    first = done("demo", "--json").json
    Path("runs/sonnets/metrics.jsonl").unlink()
    again = done("demo", "--json")
    assert again.json | {"seconds": 0} == first | {"seconds": 0}
    assert "resuming" not in again.err
    assert Path("runs/sonnets", MARK).is_file()


def test_an_empty_folder_is_taken():
    Path("here").mkdir()
    done("demo", "--out", "here")
    assert Path("here", "recipe.toml").is_file()


@pytest.mark.parametrize("name", ["thesis.txt", "recipe.toml", ".hidden"])
def test_a_folder_that_no_demo_left_is_refused_and_untouched(name):
    Path("runs/sonnets").mkdir(parents=True)
    Path("runs/sonnets", name).write_text("dear", encoding="utf-8")
    assert "runs/sonnets: not empty, and not left by an earlier demo" in refused("demo")


def test_an_out_that_is_a_file_is_refused():
    Path("here").write_text("dear", encoding="utf-8")
    assert "here: a file; --out must be a folder that is absent, empty or left by" in refused("demo", "--out", "here")


def test_it_counts_parameters_as_inspect_does():
    told = done("demo").out
    assert f"{done('inspect', 'runs/sonnets', '--json').json['parameters']:,} parameters" in told


def test_a_run_of_train_is_not_taken_for_a_demo(sonnets):
    done("train", "sonnets", "--data", sonnets.folder, "--stop-at", "0", "--device", "cpu")
    before = files_in(Path("runs"))
    refused("demo")
    assert files_in(Path("runs")) == before
