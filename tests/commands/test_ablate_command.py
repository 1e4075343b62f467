import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quatrain.training.progress import BarWatcher
from test_cli import TINY, call, done, files_in, refused

SWITCHES = ["--switch", "optim.lr=0.03", "--switch", "model.mlp=swiglu"]
VARIANTS = ["base", "optim.lr=0.03", "model.mlp=swiglu"]
FILES = ["ablation.csv", "ablation.json", "ablation.md", "ablation.svg", "ablation.toml"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def base(sonnets):
    """The words of a tiny ablation without a switch, into the folder `out`."""
    return ["ablate", "sonnets", *TINY, "--data", str(sonnets.folder), "--out", "out", "--seeds", "2"]


@pytest.fixture(scope="module")
def whole(sonnets, tmp_path_factory):
    """What an ablation that nothing disturbed answers."""
    out = tmp_path_factory.mktemp("whole") / "out"
    words = ["sonnets", *TINY, "--data", sonnets.folder, "--out", out, "--seeds", "2", *SWITCHES]
    return done("ablate", *words, "--json")


def losses(facts):
    return {row["variant"]: row["losses"] for row in facts["variants"]}


def test_json_is_the_last_line_of_stdout_and_people_read_the_table(whole, sonnets):
    facts = whole.json
    assert whole.out.count("\n") == 1
    assert [row["variant"] for row in facts["variants"]] == VARIANTS
    assert (facts["seeds"], facts["steps"], facts["tokens"]) == ([42, 43], 6, 6 * 64)
    assert facts["val_tokens"] == facts["val_split_tokens"] == len(sonnets.val) - 1
    assert "sonnets and 2 variants x 2 seeds: 6 runs of 6 steps of 64 tokens" in whole.err
    assert (Path(facts["out"]) / "ablation.md").read_text(encoding="utf-8") in whole.err
    assert facts["to_loss"] == facts["variants"][0]["mean"]


def test_files_hold_what_was_answered(whole):
    out = Path(whole.json["out"])
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, *VARIANTS])
    read = json.loads((out / "ablation.json").read_text(encoding="utf-8"))
    assert read.pop("curves").keys() == set(VARIANTS)
    assert read == whole.json
    rows = list(csv.DictReader((out / "ablation.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["mean"]) for row in rows] == [row["mean"] for row in read["variants"]]


def test_a_run_of_it_is_the_run_that_train_gives(whole, sonnets):
    alone = done(
        *("train", "sonnets", *TINY, "--data", sonnets.folder, "--out", "run", "--optim.lr=0.03"),
        *("--train.seed=43", "--data.seed=1338", "--train.samples=0", "--json"),
    ).json
    assert losses(whole.json)["optim.lr=0.03"][1] == alone["val_loss"]
    assert Path(whole.json["out"], "optim.lr=0.03", "seed_43", "recipe.toml").is_file()


def test_without_a_switch_it_measures_the_noise_alone(base):
    facts = done(*base, "--json").json
    assert [row["verdict"] for row in facts["variants"]] == ["base"]
    assert facts["noise"]["val_deviation"] > 0


def test_the_same_command_again_trains_nothing_and_answers_the_same(base, monkeypatch):
    first = done(*base, *SWITCHES, "--json").json
    before = files_in(Path("out"))
    monkeypatch.setattr("quatrain.training.ablation.train", None)
    assert done(*base, *SWITCHES, "--json").json == first
    assert files_in(Path("out")) == before


def test_more_switches_and_seeds_go_on_from_what_is_there(base, whole):
    done(*base, "--seeds", "1")
    answer = done(*base, *SWITCHES, "--json")
    assert "[1/6] base, seed 42" in answer.err
    assert answer.err.count("(finished before)") == 1
    assert losses(answer.json) == losses(whole.json)


def test_product_is_every_combination_in_folders_of_its_own(base):
    facts = done(*base, *SWITCHES, "--product", "--seeds=1", "--json").json
    both = "optim.lr=0.03 + model.mlp=swiglu"
    assert [row["variant"] for row in facts["variants"]] == ["base", "model.mlp=swiglu", "optim.lr=0.03", both]
    assert Path("out/optim.lr=0.03+model.mlp=swiglu/seed_42/recipe.toml").is_file()


def test_to_loss_is_the_loss_to_which_tokens_are_told(base):
    assert done(*base, "--to-loss=9", "--seeds=1", "--json").json["variants"][0]["tokens_to_loss"] == 0.0
    assert done(*base, "--to-loss=0.1", "--seeds=1", "--json").json["variants"][0]["tokens_to_loss"] is None


def test_out_is_runs_and_the_recipe_s_name_by_default(sonnets):
    done("ablate", "sonnets", *TINY, "--data", sonnets.folder, "--seeds", "1")
    assert Path("runs/ablate-sonnets/ablation.json").is_file()


def test_all_mistakes_are_told_at_once_before_anything_is_made(base):
    words = ["--switch", "model.n_layr=2", "--switch", "model.mlp=swigluu", "--switch", "train.steps=9"]
    told = refused(*base, *words, "--seeds=0", "--to-loss=-1", "--optim.lrr=3")
    assert told.startswith("error: 6 mistakes")
    for part in (
        "--seeds is 0, it must be at least 1",
        "--to-loss is -1.0, it must be above 0",
        "no option --optim.lrr (did you mean '--optim.lr'?)",
        "--switch model.n_layr: no such setting (did you mean 'model.n_layer'?)",
        "(did you mean 'swiglu'?)",
        "--switch train.steps cannot be: an ablation compares at equal tokens",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--switch", "model.n_head=3"], "model.n_head=3: model.n_embd 16 is not a multiple of n_head 3; nearest: 15"),
        (["--switch", "train.precision=fp16"], "train.precision=fp16: train.precision fp16 gains nothing on a CPU"),
        (["--train.eval-every=0"], "base: train.eval_every is 0"),
        (["--model.vocab-size=100"], "model.vocab_size is 100, the store's tokenizer has 56 ids"),
        (["--switch", "model.bias=true"], "--switch model.bias has no value but the base's, true"),
        (["--swich", "optim.lr=1"], "no option --swich (did you mean '--switch'?)"),
        (["--data", "nope"], "nope: no such folder; make a token store with"),
    ],
)
def test_wrong_input_is_exit_2_one_message_and_no_folder(base, words, expected):
    assert expected in refused(*base, *words)


def test_without_data_it_prints_the_prepare_command_of_the_recipe():
    told = refused("ablate", "sonnets")
    assert "ablate needs --data STORE" in told
    assert "quatrain prepare corpus:sonnets" in told


def test_without_scipy_nothing_is_trained(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert "pip install 'quatrain[ablate]'" in refused(*base)
    assert done(*base, "--seeds=1", "--json").json["noise"]["val_deviation"] is None


def test_a_foreign_folder_is_named_and_untouched(base):
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("dear", encoding="utf-8")
    assert "out holds thesis.txt and is no ablation; choose another --out, nothing was touched" in refused(*base)
    Path("out/thesis.txt").unlink()
    Path("out").rmdir()
    Path("out").write_text("dear", encoding="utf-8")
    assert "out: a file; --out must be a folder" in refused(*base)


def test_another_base_in_the_same_folder_is_refused_with_both_values(base):
    done(*base, "--seeds=1")
    told = refused(*base, "--optim.lr=0.5")
    assert "out holds an ablation of another base" in told
    assert "optim.lr: it began with 0.001, now 0.5" in told
    done(*base, "--seeds=1", "--train.micro-batch=4")


def test_a_variant_that_diverges_is_a_row_and_the_command_succeeds(base):
    hot = ["--switch", "optim.lr=1e38", "--optim.warmup=0", "--optim.clip=0", "--seeds=1"]
    answer = done(*base, *hot, "--json")
    assert answer.json["variants"][1]["verdict"] == "diverged"
    assert "diverged (1 of 1)" in answer.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_is_its_exit_code_and_the_same_command_goes_on(base, whole, monkeypatch, number):
    begun = []

    def begin(watcher, step, steps):
        begun.append(step)

    def trained(watcher, row):
        if (len(begun), row["step"]) == (3, 2):
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(BarWatcher, "begin", begin)
        patch.setattr(BarWatcher, "trained", trained)
        answer = call(*base, *SWITCHES)
    assert answer.code == 128 + number
    assert "everything is saved in out/optim.lr=0.03/seed_42/checkpoints/step_00000002" in answer.err
    assert answer.err.count("\n") == 1
    assert losses(done(*base, *SWITCHES, "--json").json) == losses(whole.json)


def test_scipy_and_torch_are_not_imported_to_refuse_a_switch():
    script = """
import sys
from quatrain.cli import main
assert main(["ablate", "sonnets", "--data", ".", "--switch", "model.mlp=x"]) == 2
print("torch" in sys.modules, "scipy" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout.split() == ["False", "False"]
