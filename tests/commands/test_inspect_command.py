import math
import shutil
from pathlib import Path

import pytest

from quatrain.tokens.store import TokenStore
from test_cli import TINY, call, done, refused


@pytest.fixture(scope="module")
def trained(sonnets, tmp_path_factory):
    """A tiny run on the sonnets."""
    folder = tmp_path_factory.mktemp("inspect") / "run"
    done("train", "sonnets", "--data", sonnets.folder, "--out", folder, *TINY)
    return folder


@pytest.fixture(autouse=True)
def store(sonnets, tmp_path, monkeypatch):
    """A copy of the sonnets' store that a test may damage, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sonnets.folder, "store")
    return Path("store")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def words(text: str) -> list[str]:
    """The lines of a text with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_store_is_told_in_tables_and_windows_of_text():
    told = words(done("inspect", "store").out)
    for line in (
        "tokenizer char, 56 ids, eot 55",
        "train 7 4,378 4,370 1.000",
        "validation: documents 7 (counted from 0), and others of the same text",
        "no document was left out",
        "train padded, by formula 7 7 2,791 38.9%",
        "padded, measured 7 7 2,791 38.9%",
        "train 4,377 4,377 55 1 6",
        "│ Shall I compare thee to a summer's day?",
    ):
        assert line in told
    assert sum(line.startswith("Window train ") for line in told) == 3
    assert sum(line.startswith("── document ") for line in told) >= 1
    assert done("inspect", "store", "--windows", "5").out.count("\nWindow ") == 5
    assert done("inspect", "store", "--windows", "0").out.count("\nWindow ") == 0


def test_json_of_a_store_is_what_store_json_says_and_more():
    answer = done("inspect", "store", "--json")
    facts = TokenStore("store").facts
    assert answer.json["fingerprint"] == facts["fingerprint"]
    assert answer.json["splits"]["train"].items() >= facts["splits"]["train"].items()
    assert answer.json["splits"]["train"]["targets"]["never"] == 1
    assert answer.json["verified"] is None
    assert len(answer.json["windows"]) == 3
    assert "train 7 4,378 4,370 1.000" in words(answer.err)
    assert len(answer.out.splitlines()) == 1


def test_padding_is_told_for_the_length_that_is_asked_for():
    told = done("inspect", "store", "--seq-len", "64", "--all", "--json").json
    padding = told["splits"]["train"]["padding"]
    assert (padding["seq_len"], padding["formula"]) == (64, padding["measured"])
    assert padding["packed_windows"] == 4377 // 64
    assert all(window["ids"] == 65 for window in told["windows"])


def test_verify_says_that_every_file_holds():
    answer = done("inspect", "store", "--verify", "--json")
    assert "every file has the hash that store.json says (5 files, " in answer.err
    assert answer.json["verified"]["files"] == 5


def test_the_page_is_written_beside_what_is_said(store):
    answer = done("inspect", "store", "--html", "store.html", "--json")
    assert answer.json["html"] == "store.html"
    assert "the same as a page: store.html" in answer.err
    page = Path("store.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>\n<html")
    assert answer.json["fingerprint"] in page
    done("inspect", "store", "--html", "store.html")
    assert Path("store.html").read_text(encoding="utf-8") == page
    assert sorted(path.name for path in Path().iterdir()) == ["store", "store.html"]


@pytest.mark.parametrize("name", ["sonnets_train_000000.bin", "sonnets_val_000000.bin", "sonnets_train.idx"])
def test_verify_names_a_file_of_the_right_size_and_another_content(store, name):
    flip(store / name, 8)
    done("inspect", "store")
    answer = call("inspect", "store", "--verify", "--json")
    assert answer.code == 2
    assert answer.json["error"].startswith(f"store/{name}: sha256 is ")
    assert answer.json["error"].count("sha256 is") == 1


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_verify_checks_the_tokenizer_too(store, how):
    path = store / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"e", b"f", 1)) if how == "changed" else path.unlink()
    assert refused("inspect", "store", "--verify", "--windows", "0").count("store/tokenizer.json: ") == 1
    assert "store/tokenizer.json: " in refused("inspect", "store", "--verify", "--windows", "0")


def test_verify_names_a_shard_with_an_id_beyond_the_vocabulary(store):
    shard = store / "sonnets_train_000000.bin"
    content = bytearray(shard.read_bytes())
    content[9] = 0xFF
    shard.write_bytes(content)
    assert "sonnets_train_000000.bin: sha256 is" in refused("inspect", "store", "--verify")
    assert refused("inspect", "store")


def test_verify_names_all_damaged_files(store):
    flip(store / "sonnets_train_000000.bin", 0)
    flip(store / "sonnets_val.idx", 0)
    told = refused("inspect", "store", "--verify")
    assert "sonnets_train_000000.bin" in told
    assert "sonnets_val.idx" in told


def test_a_file_that_is_missing_or_cut_is_named(store):
    shard = store / "sonnets_val_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "sonnets_val_000000.bin: 1,172 bytes, store.json says 1,174" in refused("inspect", "store")
    shard.unlink()
    assert "sonnets_val_000000.bin: No such file" in refused("inspect", "store")


def test_an_unfinished_store_is_told_as_such(store):
    (store / "store.json").rename(store / "prepare.json")
    assert "store: an unfinished preparation; give its prepare command again" in refused("inspect", "store")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not a store's description"),
        ("[]", "not a store's description"),
        ('{"version": 1}', "not a store's description"),
        ('{"version": 99}', "version 99 of the format, this quatrain reads version 1"),
    ],
)
def test_a_store_json_that_is_none_is_named(store, content, expected):
    (store / "store.json").write_text(content, encoding="utf-8")
    told = refused("inspect", "store")
    assert "store/store.json: " in told
    assert expected in told


def test_a_run_is_told_with_its_losses_and_checkpoints(trained):
    answer = done("inspect", trained, "--json")
    facts = answer.json
    assert facts["checkpoint"] == str(trained / "checkpoints" / "step_00000006")
    assert facts["checkpoints"] == [3, 6]
    assert (facts["last"]["step"], facts["last_validation"]["step"]) == (6, 6)
    assert facts["last"]["loss"] < 5 < facts["parameters"]
    for line in ("step 6, 384 tokens, train loss", "step 3: validation loss", "checkpoints: 3, 6", "GPT2LMHeadModel"):
        assert line in answer.err


@pytest.mark.parametrize("option", [["--html", "x.html"], ["--verify"], ["--all"]])
def test_options_of_stores_are_refused_for_a_run(trained, option):
    assert "--html, --verify and --all are for stores" in refused("inspect", trained, *option)


def test_a_checkpoint_folder_is_told_in_a_run_and_alone(trained):
    facts = done("inspect", trained / "checkpoints" / "step_00000003", "--json").json
    assert (facts["last"]["step"], facts["last_validation"]["step"]) == (3, 3)  # its own losses, not the run's last
    assert facts["checkpoint"] == str(trained / "checkpoints" / "step_00000003")
    shutil.copytree(trained / "checkpoints" / "step_00000003", "alone")
    answer = done("inspect", "alone", "--json")
    assert (answer.json["parameters"], answer.json["last"]) == (facts["parameters"], None)
    assert "a model folder without a run" in answer.err


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_the_models_of_gpt2_have_exactly_their_published_parameters(recipe, parameters):
    answer = done("inspect", "--model", recipe, "--json")
    assert answer.json["parameters"] == parameters
    assert sum(map(math.prod, answer.json["shapes"].values())) == parameters
    assert answer.json["model_type"] == "gpt2"
    assert "assuming 50,257" in answer.err


def test_names_and_shapes_are_those_on_disk():
    answer = done("inspect", "--model", "gpt2", "--json")
    shapes = answer.json["shapes"]
    assert shapes["transformer.wte.weight"] == [50257, 768]
    assert shapes["transformer.h.0.attn.c_attn.weight"] == [768, 2304]  # Conv1D: (in, out)
    assert shapes["transformer.h.11.mlp.c_fc.weight"] == [768, 3072]
    assert "lm_head.weight" not in shapes
    assert all(name in answer.err for name in shapes)


def test_settings_change_the_model_wherever_they_stand_and_dashes_are_underscores():
    answers = [
        done("inspect", "--model", "gpt2", "--model.n-layer", "2", "--json"),
        done("inspect", "--model", "gpt2", "--model.n_layer=2", "--json"),
        done("inspect", "--model.n-layer=2", "--model", "gpt2", "--json"),
        done("inspect", "--json", "--model.n_layer", "3", "--model", "gpt2", "--model.n-layer", "2"),
    ]
    assert {answer.out for answer in answers} == {answers[0].out}
    assert answers[0].json["parameters"] == 124_439_808 - 10 * 7_087_872


def test_a_vocabulary_that_is_given_is_not_assumed():
    answer = done("inspect", "--model", "sonnets", "--model.vocab-size", "56", "--json")
    assert answer.json["shapes"]["transformer.wte.weight"] == [56, 128]
    assert "assuming" not in answer.err


def test_a_runs_recipe_is_a_recipe(trained):
    told = done("inspect", "--model", trained / "recipe.toml", "--json").json
    assert told["parameters"] == done("inspect", trained, "--json").json["parameters"]


def test_a_model_that_no_class_expresses_says_so():
    answer = done("inspect", "--model", "sonnets", "--model.mlp", "swiglu", "--json")
    assert answer.json["model_type"] == "quatrain"
    assert "transformer.h.0.mlp.c_gate.weight" in answer.json["shapes"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "inspect needs a store, a run or a checkpoint folder, or --model RECIPE"),
        (["nope"], "nope: no such folder; expected a store, a run or a checkpoint folder"),
        (["."], ".: neither a run nor a checkpoint folder"),
        (["--model", "gtp2"], "did you mean 'gpt2'?"),
        (["--model", "gpt2", "--model.n-layr", "1"], "did you mean '--model.n_layer'?"),
        (["--model", "gpt2", "--windws", "3"], "did you mean '--windows'?"),
        (["--model", "gpt2", "--model.n-embd", "7"], "n_embd 7 is not a multiple of n_head 12; nearest: 12"),
        (["--model"], "--model requires an argument"),
        (["store", "--windows", "many"], '"many"'),
        (["store", "--windows=-1"], "--windows is -1, it must be at least 0"),
        (["store", "--seq-len", "0"], "--seq-len is 0, it must be at least 1"),
        (["store", "--html", "nowhere/x.html"], "expected a name that ends in .html, in a folder that exists"),
        (["store", "--html", "store/store.json"], "expected a name that ends in .html"),
        (["store", "--windws", "3"], "no option --windws (did you mean '--windows'?)"),
        (["--windws", "3", "store"], "did you mean '--windows'?"),
        (["store", "--model.n-layer", "3"], "settings need --model RECIPE"),
    ],
)
def test_wrong_input_is_exit_2_and_one_message(words, expected):
    assert expected in refused("inspect", *words)
