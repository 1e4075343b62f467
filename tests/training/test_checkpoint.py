"""Checkpoints: whole or absent, found again, and removed only when a newer one is whole."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from quatrain.errors import DataError, QuatrainError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import load_model
from quatrain.settings import option
from quatrain.tokens.config import DataConfig
from quatrain.tokens.store import TokenStore
from quatrain.training import checkpoint
from quatrain.training.checkpoint import (
    TrainerState,
    checkpoint_folder,
    checkpoints,
    damage,
    find_checkpoint,
    newest_good,
    prune,
    read_state,
    remove_leftovers,
    restore,
    run_of,
    save_checkpoint,
    settings_sha256,
)
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.optim import build_optimizer, optimizer_tensors

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer.safetensors",
    "trainer.json",
    "manifest.json",
}


def state(step: int, tokenizer: str = "tokenizer") -> TrainerState:
    return TrainerState(step, step * 4, step * 64, 0.1 * step, "data", tokenizer, "settings", "next", {})


def network(store: TokenStore, seed: int = 1, **changes: object) -> tuple[GPT, torch.optim.Optimizer]:
    """A tiny network and an optimizer that has made an update."""
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": store.vocab_size} | changes
    model = GPT(ModelConfig(**shape), torch.Generator().manual_seed(seed))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    ids = torch.arange(8).unsqueeze(0)
    model(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    return model, optimizer


def save(run: Path, store: TokenStore, step: int, seed: int | None = None) -> Path:
    model, optimizer = network(store, step if seed is None else seed)
    return save_checkpoint(run, model, store.tokenizer, optimizer, state(step, store.tokenizer.sha256))


@pytest.fixture(scope="module")
def _saved(sonnets: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    for step in (10, 20, 30):
        save(run, sonnets, step)
    return run


@pytest.fixture
def run(_saved: Path, tmp_path: Path) -> Path:
    """A run with checkpoints at steps 10, 20 and 30."""
    return Path(shutil.copytree(_saved, tmp_path / "run"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def steps(run: Path) -> list[int]:
    return [step for step, _ in checkpoints(run)]


def test_a_checkpoint_holds_the_files_of_the_design_and_a_manifest_of_their_hashes(run: Path) -> None:
    folder = run / "checkpoints" / "step_00000020"
    found = content(folder)
    assert found.keys() == FILES
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in found.items() if name != "manifest.json"}
    assert json.loads(found["manifest.json"]) == {"files": hashes}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step_000000{step}" for step in (10, 20, 30)}


def test_an_equal_state_gives_equal_bytes_also_over_an_older_one(sonnets: TokenStore, tmp_path: Path) -> None:
    saved = [save(tmp_path / name, sonnets, 5) for name in ("a", "b", "b")]
    assert content(saved[0]) == content(saved[1]) == content(saved[2])
    assert content(save(tmp_path / "b", sonnets, 5, seed=6)) != content(saved[0])


LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "dropout": 0.1}


@pytest.mark.parametrize("switches", [{}, LLAMA, LLAMA | {"qk_norm": True}, {"zero_init": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_moments_and_state_come_back_to_the_bit(
    sonnets: TokenStore, tmp_path: Path, tied: bool, switches: dict[str, object]
) -> None:
    model, optimizer = network(sonnets, tied=tied, **switches)
    folder = save_checkpoint(tmp_path, model, sonnets.tokenizer, optimizer, state(7))
    other, other_optimizer = network(sonnets, seed=2, tied=tied, **switches)
    restore(folder, other, other_optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    expected, found = optimizer_tensors(model, optimizer), optimizer_tensors(other, other_optimizer)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (other.head_weight is other.transformer["wte"].weight) == tied
    assert read_state(folder) == state(7)
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(load_model(folder)(ids), model.eval()(ids))


def test_another_shape_or_unreadable_moments_are_errors(sonnets: TokenStore, run: Path) -> None:
    folder = checkpoint_folder(run, 30)
    with pytest.raises(DataError, match="other switches"):
        restore(folder, *network(sonnets, n_embd=16))
    (folder / "trainer.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"trainer\.safetensors"):
        restore(folder, *network(sonnets))
    (folder / "trainer.json").write_text('{"step": 3}')
    with pytest.raises(DataError, match=r"trainer\.json"):
        read_state(folder)


def test_steps_are_ordered_as_numbers_and_other_folders_passed_over(tmp_path: Path) -> None:
    for step in (5, 123_456_789, 99_999_999):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    for name in ("step_12", "step_00000001.old", "notes", ".step_00000002.tmp"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert steps(tmp_path) == [5, 99_999_999, 123_456_789]
    assert checkpoint_folder(tmp_path, 5).name == "step_00000005"
    assert checkpoints(tmp_path / "absent") == []


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def _one_bit(folder: Path) -> None:
    path = folder / "trainer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _missing(folder: Path) -> None:
    (folder / "trainer.json").unlink()


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


FAULTS = [_truncated, _one_bit, _missing, _no_manifest, _empty_manifest, _emptied]


@pytest.mark.parametrize("fault", FAULTS)
def test_case_29_case_30_a_damaged_newest_falls_back_to_the_one_before_and_says_so(run: Path, fault: object) -> None:
    reports: list[str] = []
    newest = checkpoint_folder(run, 30)
    assert newest_good(run, reports.append) == newest
    assert reports == []
    fault(newest)
    assert damage(newest) is not None
    assert newest_good(run, reports.append) == checkpoint_folder(run, 20)
    assert len(reports) == 1
    assert str(newest) in reports[0]
    assert find_checkpoint(run, reports.append) == checkpoint_folder(run, 20)


def test_a_run_without_a_whole_checkpoint_and_what_is_no_run_are_errors(run: Path, tmp_path: Path) -> None:
    for _, folder in checkpoints(run):
        _truncated(folder)
    assert newest_good(run, lambda text: None) is None
    with pytest.raises(DataError, match="no whole checkpoint"):
        find_checkpoint(run, lambda text: None)
    with pytest.raises(DataError, match=r"no such run or checkpoint folder|neither a run nor a checkpoint"):
        find_checkpoint(tmp_path / "absent", lambda text: None)


def test_a_checkpoint_folder_stands_for_itself_and_knows_its_run(run: Path) -> None:
    folder = checkpoint_folder(run, 10)
    assert find_checkpoint(folder, lambda text: None) == folder
    assert run_of(folder) is None
    (run / "recipe.toml").touch()
    assert run_of(folder) == run.resolve()
    assert run_of(run / "models" / "imported") is None  # two levels below a recipe, and no checkpoint of it


@pytest.mark.parametrize(
    "moment",
    [
        "quatrain.training.checkpoint.save_model",
        "quatrain.training.checkpoint.optimizer_tensors",
        "quatrain.training.checkpoint._sha256",
        "quatrain.training.checkpoint.os.fsync",
        "quatrain.training.checkpoint.sync_folder",
        "pathlib.Path.rename",
    ],
)
def test_case_30_a_save_that_is_killed_leaves_the_old_checkpoint_and_a_leftover(
    sonnets: TokenStore, run: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(checkpoint_folder(run, 30))

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, killed)
    with pytest.raises(KeyboardInterrupt):
        save(run, sonnets, 40)
    monkeypatch.undo()
    assert newest_good(run, pytest.fail) == checkpoint_folder(run, 30)
    assert (run / "checkpoints" / ".step_00000040.tmp").is_dir()
    remove_leftovers(run)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step_000000{step}" for step in (10, 20, 30)}
    assert content(checkpoint_folder(run, 30)) == before


def test_a_save_that_fails_names_the_folder_and_keeps_the_old_one(
    sonnets: TokenStore, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quatrain.training.checkpoint.os.fsync", full)
    with pytest.raises(QuatrainError, match=r"step_00000040: cannot write: No space left") as raised:
        save(run, sonnets, 40)
    assert raised.value.exit_code == 1
    assert newest_good(run, pytest.fail) == checkpoint_folder(run, 30)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "keep_steps", "kept"),
    [
        (1, 0, [], [30]),
        (2, 0, [], [20, 30]),
        (3, 0, [], [10, 20, 30]),
        (9, 0, [], [10, 20, 30]),
        (1, 10, [], [10, 20, 30]),
        (1, 20, [], [20, 30]),
        (1, 0, [10], [10, 30]),
        (1, 0, [15], [30]),
    ],
)
def test_only_checkpoints_that_no_rule_keeps_are_removed(
    run: Path, keep_last: int, keep_every: int, keep_steps: list[int], kept: list[int]
) -> None:
    prune(run, keep_last, keep_every, keep_steps)
    assert steps(run) == kept


@pytest.mark.parametrize("fault", FAULTS)
def test_case_62_nothing_is_removed_while_the_newest_is_damaged(
    run: Path, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(checkpoint_folder(run, 30))
    prune(run, 1, 0, [])
    assert steps(run) == [10, 20, 30]
    monkeypatch.setattr(checkpoint, "damage", lambda folder: None)  # the fault: trusting the newest unread
    prune(run, 1, 0, [])
    assert steps(run) == [30]
    assert newest_good(run, pytest.fail) == checkpoint_folder(run, 30)


def settings_hash(**changes: object) -> str:
    """The hash of a run's settings; a key is a section's and a field's name."""
    sections = {
        "model": ModelConfig(n_layer=2, n_embd=16, n_head=2, vocab_size=11),
        "optim": OptimConfig(),
        "data": DataConfig(store="here", seq_len=8),
        "train": TrainConfig(precision="fp32"),
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        sections[section] = replace(sections[section], **{name: value})
    return settings_sha256(**sections)


DECIDES = {
    "model_n_layer": 3,
    "model_n_kv_head": 1,
    "model_dropout": 0.1,
    "model_tied": False,
    "model_mlp": "swiglu",
    "optim_lr": 1e-3,
    "optim_betas": (0.9, 0.99),
    "optim_schedule": "wsd",
    "optim_clip": 0.0,
    "data_seq_len": 4,
    "data_order": "random",
    "data_packing": "document",
    "data_seed": 1,
    "train_steps": 999,
    "train_tokens_per_step": 1024,
    "train_precision": "bf16",
    "train_seed": 1,
}
MAY_CHANGE = {
    "model_n_kv_head": 2,  # as many as query heads, as without it
    "model_vocab_multiple": 1,
    "model_rope_theta": 5e5,  # of a model without rotation
    "data_store": "there",
    "train_micro_batch": 4,
    "train_eval_every": 7,
    "train_eval_tokens": 7,
    "train_save_every": 7,
    "train_keep_last": 7,
    "train_keep_best": True,
    "train_compile": False,
    "train_deterministic": True,
    "train_samples": 7,
    "train_sample_prompt": "I",
}


def test_the_hash_of_settings_is_of_those_that_decide_numbers() -> None:
    assert len({settings_hash(), *(settings_hash(**{key: value}) for key, value in DECIDES.items())}) == 18
    assert {settings_hash(**{key: value}) for key, value in MAY_CHANGE.items()} == {settings_hash()}
    rope = settings_hash(model_position="rope")
    assert settings_hash(model_position="rope") == rope != settings_hash()
    told_apart = settings_sha256(
        ModelConfig(n_layer=2, n_embd=16, n_head=2, vocab_size=11, position="rope", rope_theta=5e5),
        OptimConfig(),
        DataConfig(store="here", seq_len=8),
        TrainConfig(precision="fp32"),
    )
    assert told_apart != rope


def test_a_setting_that_a_later_version_adds_changes_the_hash_only_where_it_is_set() -> None:
    @dataclass(frozen=True)
    class Later(OptimConfig):
        nesterov: bool = option(True, "of a later version")

    def hashed(optim: OptimConfig) -> str:
        network = ModelConfig(n_layer=2, n_embd=16, n_head=2, vocab_size=11)
        return settings_sha256(network, optim, DataConfig(seq_len=8), TrainConfig(precision="fp32"))

    assert hashed(Later()) == hashed(OptimConfig())
    assert hashed(Later(lr=1e-3)) == hashed(OptimConfig(lr=1e-3)) != hashed(OptimConfig())
    assert hashed(Later(nesterov=False)) != hashed(Later())


@pytest.mark.parametrize(
    "change",
    [
        {"optim_kind": "muon"},
        {"optim_momentum": 0.9},
        {"optim_momentum_warmup": 0},
        {"model_zero_init": True},
        {"model_logit_softcap": 15.0},
        {"model_value_residual": True},
        {"model_embedding_shortcut": True},
    ],
    ids="".join,
)
def test_switches_for_learning_faster_decide_numbers(change: dict[str, object]) -> None:
    assert settings_hash(**change) != settings_hash()


def test_what_was_restored_can_be_saved_again_as_the_same_bytes(sonnets: TokenStore, run: Path, tmp_path: Path) -> None:
    model, optimizer = network(sonnets, seed=99)
    restore(checkpoint_folder(run, 20), model, optimizer)
    again = save_checkpoint(
        tmp_path / "again", model, sonnets.tokenizer, optimizer, state(20, sonnets.tokenizer.sha256)
    )
    assert content(again) == content(checkpoint_folder(run, 20))
