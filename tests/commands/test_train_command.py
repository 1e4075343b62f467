import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from quatrain.model.pretrained import load_model
from quatrain.recipes.named import RECIPES
from quatrain.recipes.resolve import options, resolve
from quatrain.training.progress import TerminalWatcher
from test_cli import TINY, call, done, files_in, full_after, refused

KEYS = {
    "step",
    "tokens",
    "train_loss",
    "val_loss",
    "tokens_per_second",
    "data_wait",
    "seconds",
    "checkpoint",
    "stopped",
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny():
    """The words of a tiny training into the folder `run`, but for its data."""
    return ["train", "sonnets", "--out", "run", *TINY]


@pytest.fixture
def train(tiny, sonnets):
    """The same on the sonnets."""
    return [*tiny, "--data", str(sonnets.folder)]


@pytest.fixture(scope="module")
def whole(sonnets, tmp_path_factory):
    """What an uninterrupted run gives."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return done("train", "sonnets", "--out", out, *TINY, "--data", sonnets.folder, "--json").json


def rows(run: str = "run") -> list[dict[str, object]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def store_of(text: str, folder: str) -> str:
    """A char store of one text, its last tenth held out."""
    Path(f"{folder}.txt").write_text(text, encoding="utf-8")
    done("prepare", f"{folder}.txt", "--tokenizer", "char", "--val-tail", "0.1", "--out", folder)
    return folder


def test_json_is_the_last_line_of_stdout_and_people_read_stderr(train):
    answer = done(*train, "--json")
    facts = answer.json
    assert answer.out.count("\n") == 1
    assert set(facts) == KEYS
    assert (facts["step"], facts["tokens"], facts["stopped"]) == (6, 6 * 64, False)
    assert facts["train_loss"] == next(row["loss"] for row in rows() if row["step"] == 6 and "loss" in row)
    assert facts["val_loss"] == rows()[-1]["val_loss"]
    assert Path(facts["checkpoint"]) == Path("run/checkpoints/step_00000006")
    assert "step 6 of 6" in answer.err


def test_a_finished_run_given_again_does_nothing_new(train):
    first = done(*train, "--json").json
    before = files_in(Path("run"))
    again = done(*train, "--json")
    assert again.json == first
    assert files_in(Path("run")) == before
    assert "resuming from run/checkpoints/step_00000006: step 6 of 6" in again.err


def test_stop_at_saves_there_and_the_same_command_without_it_ends_like_an_uninterrupted_run(train, whole):
    stopped = done(*train, "--stop-at", "2", "--json").json
    assert (stopped["step"], stopped["stopped"]) == (2, True)
    assert Path("run/checkpoints/step_00000002/manifest.json").is_file()
    ended = done(*train, "--json").json
    assert (ended["step"], ended["stopped"]) == (6, False)
    assert (ended["train_loss"], ended["val_loss"]) == (whole["train_loss"], whole["val_loss"])


def test_the_last_of_two_equal_options_wins(train):
    assert done(*train, "--stop-at", "0", "--stop-at", "1", "--json").json["step"] == 1


def test_stop_at_0_saves_the_untrained_model(train):
    answer = done(*train, "--stop-at", "0", "--json").json
    assert (answer["step"], answer["tokens"], answer["train_loss"], answer["stopped"]) == (0, 0, None, True)
    assert Path(answer["checkpoint"]).is_dir()


def test_recipe_toml_of_a_run_is_its_whole_configuration_and_accepted_back(train, sonnets):
    first = done(*train, "--json").json
    config, _ = resolve("run/recipe.toml")
    assert (config.data.store, config.model.vocab_size) == (str(sonnets.folder), sonnets.vocab_size)
    assert (config.train.steps, config.model.n_layer) == (6, 1)
    flat = {"device"} | {f"{section}.{key}" for section, table in _tables("run/recipe.toml") for key in table}
    assert flat == {option.key for option in options()}
    assert done("train", "run/recipe.toml", "--out", "run", "--json").json == first
    other = done("train", "run/recipe.toml", "--out", "other", "--json").json
    assert other["train_loss"] == first["train_loss"]


def test_the_precision_that_auto_means_here_is_what_is_saved(train):
    done(*train, "--train.precision=auto", "--stop-at=0")
    assert resolve("run/recipe.toml")[0].train.precision in ("fp32", "bf16")


def _tables(path: str) -> list[tuple[str, dict[str, object]]]:
    content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    return [(name, table) for name, table in content.items() if isinstance(table, dict)]


def test_flags_stand_before_or_after_the_recipe_later_wins_and_dashes_are_underscores(sonnets):
    before = ["--model.bias=false", "--model.n_layer", "3", "--optim.lr", "1e-2"]
    after = ["--model.n-layer", "2", "--out=run", "--model.qk_norm", "true", f"--data={sonnets.folder}", "--stop-at=0"]
    done("train", *TINY, *before, "sonnets", *after)
    config, _ = resolve("run/recipe.toml")
    assert (config.model.bias, config.model.qk_norm, config.model.n_layer, config.optim.lr) == (False, True, 2, 1e-2)


def test_out_is_runs_and_the_recipes_name_by_default(sonnets):
    words = ["--data", str(sonnets.folder), *TINY, "--stop-at", "0"]
    done("train", "sonnets", *words)
    assert Path("runs/sonnets/recipe.toml").is_file()
    os.rename("runs/sonnets/recipe.toml", "mine.toml")
    done("train", "mine.toml", *words)
    assert Path("runs/mine/recipe.toml").is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_without_data_it_prints_the_prepare_command_of_the_recipe(name):
    told = refused("train", name)
    assert "train needs --data STORE" in told
    assert RECIPES[name]().prepare in told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.n_layr", "2"], "no option --model.n_layr (did you mean '--model.n_layer'?)"),
        (["--model.n-layr=2"], "did you mean '--model.n_layer'?"),
        (["--outt", "R"], "no option --outt (did you mean '--out'?)"),
        (["--stop-att=2"], "did you mean '--stop-at'?"),
        (["extra"], "'extra' is neither an option nor the value of one"),
        (["--optim.betas", "0.9"], "--optim.betas is '0.9', expected 2 values like 0.9,0.95"),
        (["--model.bias", "no"], "--model.bias is 'no', expected true or false"),
        (["--optim.clip=-1"], "optim.clip is -1.0, it must be at least 0"),
        (["--model.n-embd", "15"], "n_embd 15 is not a multiple of n_head 2; nearest: 16"),
        (["--model.vocab-size", "100"], "model.vocab_size is 100, the store's tokenizer has 56 ids"),
        (["--train.tokens-per-step", "100"], "micro_batch 2 x seq_len 16 x 1 device = 32; nearest: 96 or 128"),
        (["--data.seq-len", "32"], "data.seq_len 32 is above model.block_size 16"),
        (["--optim.warmup", "7"], "optim.warmup + optim.cooldown is 7, above train.steps 6"),
        (["--train.precision", "fp16"], "train.precision fp16 gains nothing on a CPU"),
        (["--train.precision", "bf8"], "expected one of: auto, fp32, bf16, fp16"),
        (["--stop-at", "-1"], "--stop-at is -1, it must be at least 0"),
        (["--stop-at=soon"], '"soon"'),
        (
            ["--optim.lr", "--train.steps=3"],
            "--optim.lr needs a value (write --optim.lr=VALUE for one that begins with",
        ),
        (["--optim.lr=inf"], "optim.lr is inf, it must be finite"),
        (["--optim.weight-decay=inf"], "optim.weight_decay is inf, it must be finite"),
        (["--model.rope-theta=inf"], "model.rope_theta is inf, it must be finite"),
        ([f"--train.seed={2**64}"], f"train.seed is {2**64}, it must be in 0 .. 2^63 - 1"),
        (["--train.sample-prompt=\udcff"], "--train.sample_prompt is '\\udcff', expected a text"),
        (["--learning-rate", "1"], "no option --learning-rate (did you mean '--optim.lr'?)"),
    ],
)
def test_wrong_input_is_exit_2_one_message_and_no_run_folder(train, words, expected):
    assert expected in refused(*train, *words)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "cuda:x", ""])
def test_a_device_that_is_not_there_is_refused_before_the_run_folder_exists(train, device):
    words = [word for word in train if not word.startswith("--device")]
    assert f"device '{device}'" in refused(*words, "--device", device)


def test_a_store_that_is_not_there_is_told_with_the_command_that_makes_it(tiny):
    assert "nope: no such folder; make a token store with: quatrain prepare SOURCE --out" in refused(
        *tiny, "--data", "nope"
    )
    Path("mine.txt").write_text("text")
    assert "mine.txt: a file, not a token store; make one with: quatrain prepare" in refused(
        *tiny, "--data", "mine.txt"
    )


def test_a_run_and_a_store_in_each_other_s_place_are_told(tiny, whole, sonnets):
    run = Path(whole["checkpoint"]).parents[1]
    assert "a run or checkpoint, not a token store" in refused(*tiny, "--data", run)
    assert "a token store, not a run" in refused("evaluate", sonnets.folder)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("sonets", "no recipe 'sonets' (did you mean 'sonnets'?)"),
        ("nope.toml", "nope.toml: No such file or directory; expected a recipe in TOML"),
    ],
)
def test_a_recipe_that_is_not_there_is_told(sonnets, recipe, expected):
    assert expected in refused("train", recipe, "--data", sonnets.folder)


def test_case_61_unknown_keys_in_toml_and_flags_are_all_told_with_the_nearest_right_ones(sonnets):
    Path("my.toml").write_text("[optim]\nlearing_rate = 1\nwarm_up = 2\n[train]\nstepz = 3\n", encoding="utf-8")
    told = refused("train", "my.toml", "--data", sonnets.folder, "--model.n_embed", "8", "--dvice", "cpu")
    assert told.startswith("error: 5 mistakes")
    for wrong, right in [("learing_rate", "lr"), ("warm_up", "warmup")]:
        assert f"my.toml: optim.{wrong}: no such setting (did you mean 'optim.{right}'?)" in told
    assert "my.toml: train.stepz: no such setting (did you mean 'train.steps'?)" in told
    assert "no option --model.n_embed (did you mean '--model.n_embd'?)" in told
    assert "no option --dvice (did you mean '--device'?)" in told


def test_mistakes_of_all_sections_are_told_at_once(train):
    told = refused(*train, "--model.n-layer=0", "--model.dropout=1.5", "--train.tokens-per-step=100")
    assert told.startswith("error: 3 mistakes")
    for name in ("model.n_layer", "model.dropout", "train.tokens_per_step"):
        assert name in told


def test_case_08_a_split_shorter_than_a_window_is_told_with_both_numbers(tiny):
    short = store_of("a fifty-character text, as small as a corpus gets.", "short")
    words = ["--data", short, "--model.block-size=64", "--data.seq-len=64", "--train.tokens-per-step=128"]
    told = refused(*tiny, *words)
    assert "the train split has 47 ids, a window of seq_len 64 needs 65" in told


def test_an_unfinished_store_is_not_trained_on(tiny):
    store = store_of("some text " * 20, "store")
    os.rename("store/store.json", "store/prepare.json")
    assert "store: an unfinished preparation" in refused(*tiny, "--data", store)


def test_a_store_cut_short_is_named_before_anything_is_made(tiny):
    store = store_of("some text " * 20, "store")
    shard = Path("store/store_train_000000.bin")
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    sizes = f"{len(content) - 2} bytes, store.json says {len(content)}"
    assert f"store_train_000000.bin: {sizes}" in refused(*tiny, "--data", store)


def test_a_foreign_folder_is_named_and_untouched(train):
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("dear", encoding="utf-8")
    assert "run holds thesis.txt and is not a run of ours; choose another --out, nothing was touched" in refused(*train)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "checkpoints/mine.bin"])
def test_a_folder_of_someone_else_with_a_name_of_ours_is_untouched(train, name):
    Path("run", name).parent.mkdir(parents=True)
    Path("run", name).write_text('{"a": 1}\n', encoding="utf-8")
    assert f"run holds {Path(name).parts[0]} and is not a run of ours" in refused(*train)


def test_an_out_that_is_a_file_is_refused(train):
    Path("run").write_text("dear", encoding="utf-8")
    assert "run: a file; --out must be a folder that is absent, empty or our own" in refused(*train)


def test_a_foreign_recipe_toml_is_named_and_untouched(train):
    Path("run").mkdir()
    Path("run/recipe.toml").write_text("flour = 500\n", encoding="utf-8")
    assert "run/recipe.toml: flour: no such setting" in refused(*train)


def test_settings_changed_on_resume_are_named_with_both_values(train):
    done(*train, "--stop-at", "1")
    told = refused(*train, "--model.n-layer=2", "--optim.lr=0.5", "--data.seed=7", "--train.keep-last=9")
    assert "run holds a run of other settings" in told
    for line in (
        "  - model.n_layer: it began with 1, now 2",
        "  - optim.lr: it began with 0.001, now 0.5",
        "  - data.seed: it began with 1337, now 7",
    ):
        assert line in told
    assert "keep_last" not in told


def test_settings_that_change_no_number_may_change_on_resume(train):
    done(*train, "--stop-at", "2")
    words = ["--train.eval-every=2", "--train.save-every=0", "--train.keep-last=1", "--train.sample-prompt=I"]
    assert done(*train, *words, "--json").json["step"] == 6
    assert resolve("run/recipe.toml")[0].train.eval_every == 2


def test_micro_batch_may_change_on_resume(train, whole):
    done(*train, "--stop-at", "2")
    ended = done(*train, "--train.micro-batch=4", "--json").json
    assert ended["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-5)


def test_case_59_a_store_of_another_tokenizer_is_refused_on_resume(tiny):
    one, other = store_of("abcd" * 50, "one"), store_of("abce" * 50, "other")
    done(*tiny, "--data", one, "--stop-at", "1")
    assert "run was trained with another tokenizer than that of" in refused(*tiny, "--data", other)


def test_a_store_of_another_fingerprint_is_refused_on_resume(tiny):
    one, other = store_of("abcd" * 50, "one"), store_of("dcba" * 50, "other")
    done(*tiny, "--data", one, "--stop-at", "1")
    told = refused(*tiny, "--data", other)
    assert "run was trained on a store of fingerprint" in told
    assert "give the store it began with, or another --out" in told


def test_a_moved_store_goes_on(tiny):
    one = store_of("abcd" * 50, "one")
    done(*tiny, "--data", one, "--stop-at", "1")
    os.rename("one", "two")
    assert done(*tiny, "--data", "two", "--json").json["step"] == 6


def test_a_model_that_no_class_expresses_is_said_before_the_first_step(train):
    out = done(*train, "--model.qk-norm=true", "--model.mlp=swiglu", "--stop-at", "0").out
    assert "checkpoints are model_type 'quatrain'" in out


LLAMA = ["--model.position=rope", "--model.norm=rmsnorm", "--model.mlp=swiglu", "--model.bias=false"]


@pytest.mark.parametrize(
    ("switches", "model_type"),
    [
        (["--model.tied=false", "--model.dropout=0.1"], "llama"),
        (["--model.n-kv-head=1", "--model.qk-norm=true"], "qwen3"),
    ],
)
def test_a_checkpoint_of_a_run_of_llama_or_qwen3_is_a_folder_of_transformers(train, sonnets, switches, model_type):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done(*train, *LLAMA, *switches, "--stop-at", "3")
    answer = done(*train, *LLAMA, *switches, "--json")  # it goes on from such a folder
    assert "model_type" not in answer.err
    folder = answer.json["checkpoint"]
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert theirs.config.model_type == model_type
    ids = tokenizer("When in the chro", return_tensors="pt").input_ids
    assert ids[0].tolist() == sonnets.tokenizer.encode("When in the chro").tolist()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, load_model(Path(folder))(ids), atol=1e-5, rtol=0)
    assert theirs.config.architectures[0] in done("inspect", "run").out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_training_saves_the_work_at_the_end_of_the_step(train, whole, monkeypatch, number):
    def trained(watcher: TerminalWatcher, row: dict[str, object]) -> None:
        if row["step"] == 2:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(TerminalWatcher, "trained", trained)
        answer = call(*train)
    assert answer.code == 128 + number
    saved = Path("run/checkpoints/step_00000002")
    assert answer.err.startswith(f"error: stopped by a signal at step 2 of 6; everything is saved in {saved}")
    assert answer.err.count("\n") == 1
    assert saved.is_dir()
    ended = done(*train, "--json").json
    assert (ended["train_loss"], ended["val_loss"]) == (whole["train_loss"], whole["val_loss"])


def test_ctrl_c_ends_a_process_with_130_and_the_same_command_goes_on(train):
    words = [*train, "--train.steps=1000000", "--train.eval-every=0", "--train.save-every=0"]
    command = [sys.executable, "-m", "quatrain", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not Path("run/metrics.jsonl").exists():
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    (saved,) = Path("run/checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert done(*words, "--stop-at", step + 2, "--json").json["step"] == step + 2
    assert [row["step"] for row in rows()] == list(range(1, step + 3))


@pytest.mark.parametrize("writes", [0, 1, 2, 6, 12])
def test_a_full_disk_is_exit_1_with_its_path_and_the_same_command_goes_on(train, whole, monkeypatch, writes):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after(writes))
        answer = call(*train)
    assert answer.code == 1
    assert answer.err.startswith("error: run/")
    assert "cannot write" in answer.err
    assert "No space left on device" in answer.err
    assert done(*train, "--json").json["train_loss"] == whole["train_loss"]
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
