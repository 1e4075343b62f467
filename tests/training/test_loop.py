"""The run: it goes on as if it had never stopped, whatever stopped it."""

import functools
import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from quatrain.errors import DataError, QuatrainError, Stopped, UsageError
from quatrain.inference.scoring import Score, data_hash
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.loss import loss_of
from quatrain.model.pretrained import load_model
from quatrain.tokens.config import DataConfig, PrepareConfig
from quatrain.tokens.loader import Batch, Loader
from quatrain.tokens.packing import IGNORED
from quatrain.tokens.rows import row_table
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare
from quatrain.training import checkpoint, loop, signals, step
from quatrain.training.checkpoint import checkpoint_folder, checkpoints, damage
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.flops import flops_per_token
from quatrain.training.loop import Trainer, train
from quatrain.training.metrics import JsonLines, Row
from quatrain.training.progress import Silent
from quatrain.training.schedule import learning_rate, momentum
from switches import FASTER

# 24 rows a step of about 273 windows an epoch: an epoch's border lies in the steps 12 and 23.
TINY: dict[str, Any] = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 16,
    "dropout": 0.1,
    "lr": 1e-2,
    "min_lr": 1e-3,
    "warmup": 3,
    "seq_len": 16,
    "precision": "fp32",
    "steps": 8,
    "tokens_per_step": 24 * 16,
    "micro_batch": 12,
    "eval_every": 0,
    "eval_tokens": 100,
    "save_every": 0,
    "samples": 2,
    "sample_tokens": 4,
    "sample_prompt": "",
}
SPEEDRUN: dict[str, Any] = {"kind": "muon", "momentum_warmup": 15, "n_layer": 2, **FASTER}
SAVING = {"eval_every": 2, "save_every": 3}
TIMES = {"seconds", "tokens_per_second", "data_wait", "mfu"}

Go = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Whether bytes survive a power cut is not asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def go(sonnets: TokenStore) -> Go:
    """Train in a folder: settings of all sections by their names, then stop_at and watcher."""

    def run(
        folder: Path, stop_at: int | None = None, watcher: Silent | None = None, **changes: object
    ) -> dict[str, Any]:
        return train(*sections(sonnets, **changes), folder, "# recipe\n", "cpu", stop_at, watcher)

    return run


@pytest.fixture(scope="module")
def undisturbed(go: Go, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The outcome of a run with SAVING that nothing stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    go(folder, **SAVING)
    return outcome(folder, 8)


@pytest.fixture(scope="module")
def plain(go: Go, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of TINY that nothing stopped; not to be written into."""
    folder = tmp_path_factory.mktemp("plain")
    go(folder)
    return folder


def sections(usual: TokenStore, **changes: object) -> tuple[ModelConfig, OptimConfig, DataConfig, TrainConfig]:
    """TINY with changes; `seed` is that of the model, `data_seed` that of the data."""
    values = {"store": str(usual.folder), "vocab_size": usual.vocab_size} | TINY | changes
    of_data = values | {"seed": values.get("data_seed", 1337)}

    def section(config: type, given: dict[str, Any]) -> Any:
        return config(**{field.name: given[field.name] for field in fields(config) if field.name in given})

    model, optim, train = (section(config, values) for config in (ModelConfig, OptimConfig, TrainConfig))
    return model, optim, section(DataConfig, of_data), train


def rows_of(run: Path, name: str = "metrics.jsonl") -> list[Row]:
    """What does not depend on the clock, floats to the bit."""
    return [
        {key: value.hex() if isinstance(value, float) else value for key, value in row.items() if key not in TIMES}
        for row in JsonLines(run / name).rows()
    ]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in JsonLines(run / "metrics.jsonl").rows() if "loss" in row]


def weights(run: Path, at: int) -> bytes:
    folder = checkpoint_folder(run, at)
    return b"".join((folder / name).read_bytes() for name in ("model.safetensors", "trainer.safetensors"))


def outcome(run: Path, at: int) -> tuple[object, ...]:
    """All that two runs must have in common to be the same: every loss, every weight, every moment, every sample."""
    return rows_of(run), rows_of(run, "samples.jsonl"), weights(run, at)


def steps_kept(run: Path) -> list[int]:
    return [at for at, _ in checkpoints(run)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Notes(Silent):
    """Remembers what is said, and does something at the row of a step."""

    def __init__(self, at: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.at = at
        self.act = act

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def trained(self, row: Row) -> None:
        if row["step"] == self.at:
            self.act()


def killed() -> None:
    raise SystemError("killed")


# The run as a whole


def test_a_run_begins_near_ln_v_and_learns(go: Go, sonnets: TokenStore, tmp_path: Path) -> None:
    done = go(tmp_path, steps=40, eval_every=20, dropout=0.0)
    found = losses(tmp_path)
    assert abs(found[0] - math.log(sonnets.vocab_size)) < 0.1
    assert found[-1] < 3.2
    keys = "step tokens train_loss val_loss tokens_per_second data_wait seconds checkpoint stopped"
    assert done.keys() == set(keys.split())
    assert (done["step"], done["tokens"], done["train_loss"], done["stopped"]) == (40, 40 * 384, found[-1], False)
    assert done["val_loss"] == JsonLines(tmp_path / "metrics.jsonl").rows()[-1]["val_loss"]
    assert Path(done["checkpoint"]) == checkpoint_folder(tmp_path, 40)


def test_training_rows_count_from_one_and_carry_tokens_rate_and_time(
    go: Go, sonnets: TokenStore, tmp_path: Path
) -> None:
    """case_25, case_26, case_38: the rate is a function of the optimizer's step, under accumulation and resume."""
    for stop_at in (3, 6, None):
        go(tmp_path, stop_at, steps=9, micro_batch=6)
    rows = JsonLines(tmp_path / "metrics.jsonl").rows()
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["tokens"] for row in rows] == [384 * at for at in range(1, 10)]
    assert [row["lr"] for row in rows] == [learning_rate(s, sections(sonnets)[1], 9) for s in range(9)]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(set(seconds))
    assert all(row["grad_norm"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert [row["epoch"] for row in rows] == [round(24 * at / 273, 4) for at in range(1, 10)]
    assert all(row["mfu"] > 0 for row in rows)
    assert all(0 <= row["data_wait"] <= 1 for row in rows)


def test_data_that_cannot_be_read_end_the_run_with_their_own_error_and_no_thread(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, threads = Loader.batch, threading.active_count()

    def failing(loader: Loader, first_row: int, *rest: Any) -> Batch:
        if first_row == 5 * 24 + 12:
            raise DataError("a.bin: ends at byte 7")
        return right(loader, first_row, *rest)

    monkeypatch.setattr(Loader, "batch", failing)
    with pytest.raises(DataError, match=r"^a\.bin: ends at byte 7$"):
        go(tmp_path, save_every=2)
    assert (steps_kept(tmp_path), len(losses(tmp_path))) == ([2, 4], 5)
    assert threading.active_count() == threads


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemError("killed")])
def test_whatever_ends_a_run_ends_the_thread_that_reads_ahead(
    go: Go, tmp_path: Path, error: BaseException | type[BaseException]
) -> None:
    def act() -> None:
        raise error

    threads = threading.active_count()
    with pytest.raises((KeyboardInterrupt, SystemError)):
        go(tmp_path, watcher=Notes(2, act))
    assert threading.active_count() == threads


def test_the_thread_that_reads_ahead_reads_nothing_behind_the_last_step(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, read = Loader.batch, list[int]()

    def noting(loader: Loader, first_row: int, count: int, *rest: Any) -> Batch:
        if threading.current_thread() is not threading.main_thread():
            read.append(first_row)
        return right(loader, first_row, count, *rest)

    monkeypatch.setattr(Loader, "batch", noting)
    for stop_at in (3, 3, None):
        go(tmp_path, stop_at)
    assert read == list(range(0, 8 * 24, 12))


def test_mfu_is_the_share_of_the_peak_that_the_rate_takes(
    go: Go, sonnets: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "peak_flops", lambda device, precision: 1e9)
    go(tmp_path, steps=2)
    flops = flops_per_token(sections(sonnets)[0], 16)
    for row in JsonLines(tmp_path / "metrics.jsonl").trained():
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 1e9, abs=1e-4)


def test_a_run_begins_with_what_an_epoch_is(go: Go, tmp_path: Path) -> None:
    notes = Notes()
    go(tmp_path, 4, notes)
    epochs = f"{8 * 24 / 273:.2f}"
    sentence = f"273 windows of 16 an epoch, 9 of 4,377 targets left out by its phase; this run is {epochs} epochs"
    assert notes.said == [sentence]
    go(tmp_path, watcher=notes)
    assert notes.said[2:] == [sentence]
    assert notes.said[1].endswith("step_00000004: step 4 of 8")
    assert notes.warned == []


def test_validation_rows_carry_tokens_and_the_hash_of_their_data(go: Go, sonnets: TokenStore, tmp_path: Path) -> None:
    go(tmp_path, steps=7, eval_every=3)
    rows = [row for row in JsonLines(tmp_path / "metrics.jsonl").rows() if "val_loss" in row]
    assert [row["step"] for row in rows] == [0, 3, 6, 7]  # the last step too
    assert {(row["val_tokens"], row["data_hash"]) for row in rows} == {(100, data_hash(sonnets.val, 100))}
    assert [row["tokens"] for row in rows] == [384 * row["step"] for row in rows]
    go(tmp_path / "whole", steps=1, eval_every=1, eval_tokens=10**9)
    last = JsonLines(tmp_path / "whole" / "metrics.jsonl").rows()[-1]
    assert (last["val_tokens"], last["data_hash"]) == (len(sonnets.val) - 1, data_hash(sonnets.val, None))


def test_each_validation_leaves_samples_of_the_prompt(go: Go, sonnets: TokenStore, tmp_path: Path) -> None:
    go(tmp_path, steps=4, eval_every=2, samples=3, sample_tokens=5, sample_prompt="Shall I")
    rows = JsonLines(tmp_path / "samples.jsonl").rows()
    assert [(row["step"], row["sample"]) for row in rows] == [(at, number) for at in (0, 2, 4) for number in range(3)]
    for row in rows:
        assert row["prompt"] == "Shall I"
        assert len(row["ids"]) <= 5
        assert sonnets.tokenizer.decode(row["ids"]) == row["text"]


@pytest.mark.parametrize("prompt", ["naïve", "far too long for sixteen positions"])
def test_a_prompt_that_cannot_be_spelled_or_held_becomes_a_bare_eot(go: Go, tmp_path: Path, prompt: str) -> None:
    go(tmp_path, steps=1, eval_every=1, sample_prompt=prompt)
    assert {row["prompt"] for row in JsonLines(tmp_path / "samples.jsonl").rows()} == {""}


def test_a_finished_run_holds_what_the_design_names_and_nothing_else(go: Go, tmp_path: Path) -> None:
    go(tmp_path, steps=4, save_every=2, eval_every=2)
    assert names(tmp_path) == {"recipe.toml", "metrics.jsonl", "samples.jsonl", "checkpoints"}
    assert (tmp_path / "recipe.toml").read_text() == "# recipe\n"
    assert names(tmp_path / "checkpoints") == {"step_00000002", "step_00000004"}
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names(checkpoint_folder(tmp_path, 2)) == model | {"trainer.safetensors", "trainer.json", "manifest.json"}


def test_equal_runs_give_equal_files_but_for_the_seconds(go: Go, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        go(tmp_path / name, steps=4, save_every=2, eval_every=2)
        files = content(tmp_path / name / "checkpoints")
        for place in [place for place in files if place.endswith("manifest.json")]:
            manifest = json.loads(files[place])
            del manifest["files"]["trainer.json"]
            state = json.loads(files[place.replace("manifest", "trainer")])
            assert state.pop("seconds") > 0
            files[place], files[place.replace("manifest", "trainer")] = manifest, state
        found.append((files, rows_of(tmp_path / name), rows_of(tmp_path / name, "samples.jsonl")))
    assert found[0] == found[1]


def test_the_same_call_after_the_end_changes_nothing(go: Go, tmp_path: Path) -> None:
    done = go(tmp_path, eval_every=4)
    before = content(tmp_path)
    assert go(tmp_path, eval_every=4) == done
    assert content(tmp_path) == before


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_case_11_a_run_longer_than_its_corpus_starts_the_next_epoch(
    go: Go, sonnets: TokenStore, tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case_17, case_18, case_19: rows 0, 1, 2, ... are each trained on once, over two resumes and two epochs' ends."""
    seen: list[torch.Tensor] = []
    loss_of = step.loss_of

    def noting(model: torch.nn.Module, inputs: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(inputs)
        return loss_of(model, inputs, *rest)

    monkeypatch.setattr(step, "loss_of", noting)
    for stop_at in (5, 17, None):
        go(tmp_path, stop_at, steps=26, order=order)
    loader = Loader(sonnets.train, DataConfig(seq_len=16, order=order), sonnets.eot)
    assert loader.rows_per_epoch * 2 < 26 * 24
    assert torch.equal(torch.cat(seen), loader.batch(0, 26 * 24).inputs)


def test_case_12_seeds_of_data_and_model_are_apart(go: Go, tmp_path: Path) -> None:
    def begun(name: str, seed: int, data_seed: int) -> tuple[bytes, str]:
        go(tmp_path / name, 0, seed=seed, data_seed=data_seed)
        folder = checkpoint_folder(tmp_path / name, 0)
        state = json.loads((folder / "trainer.json").read_text())
        return (folder / "model.safetensors").read_bytes(), state["next_batch"]

    first, other_data, other_model, same = begun("a", 1, 1), begun("b", 1, 2), begun("c", 2, 1), begun("d", 1, 1)
    assert first == same
    assert (first[0] == other_data[0], first[1] == other_data[1]) == (True, False)
    assert (first[0] == other_model[0], first[1] == other_model[1]) == (False, True)


def test_document_packing_trains_resumes_and_is_not_concat(go: Go, tmp_path: Path) -> None:
    go(tmp_path / "concat", steps=20, packing="concat")
    go(tmp_path / "whole", steps=20, packing="document")
    for stop_at in (8, None):
        go(tmp_path / "parts", stop_at, steps=20, packing="document")
    assert outcome(tmp_path / "whole", 20) == outcome(tmp_path / "parts", 20)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.5
    assert losses(tmp_path / "whole") != losses(tmp_path / "concat")


@pytest.fixture(scope="module")
def short_texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings of a store of 400 short documents: about 258 packed rows, or 525 padded ones, of 16."""
    folder = tmp_path_factory.mktemp("short")
    texts = [f"{'ab ' * (number % 7)}{number}" for number in range(400)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "texts.jsonl"], folder / "store", PrepareConfig(tokenizer="bytes", val_fraction=0.1))
    return {"store": str(folder / "store"), "vocab_size": 257}


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_case_22_30_packed_steps_equal_10_and_10_and_10_and_tokens_count_targets(
    go: Go, tmp_path: Path, short_texts: dict[str, object], packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is trained on once an epoch, over resumes and an epoch's end: rows are counted, not their targets."""
    settings = short_texts | {"steps": 30, "packing": packing, "eval_every": 7}
    go(tmp_path / "whole", **settings)
    seen: list[torch.Tensor] = []
    loss_of = step.loss_of

    def noting(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(targets)
        return loss_of(model, inputs, targets, *rest)

    monkeypatch.setattr(step, "loss_of", noting)
    for stop_at in (10, 20, None):
        done = go(tmp_path / "parts", stop_at, **settings)
    assert outcome(tmp_path / "parts", 30) == outcome(tmp_path / "whole", 30)
    targets = torch.cat(seen)
    store = TokenStore(str(short_texts["store"]))
    loader = Loader(store.train, DataConfig(seq_len=16, packing=packing), store.eot)
    assert torch.equal(targets, loader.batch(0, 30 * 24).targets)
    counts = (targets != IGNORED).view(30, -1).sum(1).cumsum(0).tolist()
    rows = JsonLines(tmp_path / "parts" / "metrics.jsonl")
    assert [row["tokens"] for row in rows.trained()] == counts
    assert {row["step"]: row["tokens"] for row in rows.validated()}[14] == counts[13]
    assert done["tokens"] == counts[-1] < 30 * 384
    assert abs(losses(tmp_path / "parts")[0] - math.log(257)) < 0.1  # by the targets, not by the positions
    state = json.loads((checkpoint_folder(tmp_path / "parts", 20) / "trainer.json").read_text())
    assert (state["tokens"], state["rows_consumed"]) == (counts[19], 20 * 24)


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_case_37_packed_losses_do_not_depend_on_the_micro_batch(
    go: Go, tmp_path: Path, short_texts: dict[str, object], packing: str
) -> None:
    for micro_batch in (24, 6):
        go(tmp_path / str(micro_batch), **short_texts, dropout=0.0, packing=packing, micro_batch=micro_batch)
    assert losses(tmp_path / "6") == pytest.approx(losses(tmp_path / "24"), abs=1e-5)


def test_a_packed_run_begins_with_what_its_rows_hold_and_cut(
    go: Go, tmp_path: Path, short_texts: dict[str, object]
) -> None:
    notes = Notes()
    go(tmp_path, 1, notes, **short_texts, packing="best_fit")
    store = TokenStore(str(short_texts["store"]))
    table = row_table(store.train, 16, "best_fit")
    documents = store.facts["splits"]["train"]["documents"]
    assert notes.said == [
        f"{table.rows} rows of 16 an epoch hold all {len(store.train) - 1:,} targets, "
        f"{table.padding / table.rows / 16:.1%} of their positions are padding, "
        f"{table.cut} of {documents} documents are longer and cut; this run is {8 * 24 / table.rows:.2f} epochs"
    ]
    assert 0 < table.cut < documents


def test_bf16_trains_nearly_as_fp32(go: Go, tmp_path: Path) -> None:
    go(tmp_path / "fp32", dropout=0.0)
    go(tmp_path / "bf16", dropout=0.0, precision="bf16")
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=1e-2)
    stored = load_file(checkpoint_folder(tmp_path / "bf16", 8) / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_fp16_on_a_cpu_is_refused_before_the_run_folder_exists(go: Go, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fp16"):
        go(tmp_path / "run", precision="fp16")
    assert not (tmp_path / "run").exists()


# Exact continuation


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential"])
def test_case_14_15_17_18_19_25_26_27_30_steps_equal_10_and_10_and_10(go: Go, tmp_path: Path, order: str) -> None:
    settings = {"steps": 30, "order": order, "eval_every": 7}
    go(tmp_path / "whole", **settings)
    for stop_at, stopped in [(10, True), (20, True), (None, False)]:
        assert go(tmp_path / "parts", stop_at, **settings)["stopped"] == stopped
    assert outcome(tmp_path / "parts", 30) == outcome(tmp_path / "whole", 30)


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_case_18_22_30_steps_with_muon_and_every_switch_equal_10_and_10_and_10(
    go: Go, tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SPEEDRUN | {"steps": 30, "packing": packing, "eval_every": 7}
    go(tmp_path / "whole", **settings)
    for stop_at in (10, 20, None):
        go(tmp_path / "parts", stop_at, **settings)
    assert outcome(tmp_path / "parts", 30) == outcome(tmp_path / "whole", 30)
    assert losses(tmp_path / "parts")[-1] < losses(tmp_path / "parts")[0] - 0.5
    go(tmp_path / "fault", 10, **settings)
    monkeypatch.setattr(loop, "momentum", lambda step, optim: momentum(step - 10, optim))  # counted from the resume
    go(tmp_path / "fault", **settings)
    assert weights(tmp_path / "fault", 30) != weights(tmp_path / "whole", 30)


def test_muons_momentum_is_a_function_of_the_step(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    call = step.Step.__call__

    def noting(self: step.Step, number: int, lr: float, batches: Any, valid: int, momentum: float) -> Any:
        given.append(momentum)
        return call(self, number, lr, batches, valid, momentum)

    monkeypatch.setattr(step.Step, "__call__", noting)
    for stop_at in (3, None):
        go(tmp_path, stop_at, kind="muon", momentum_warmup=4)
    assert given == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95, 0.95, 0.95])


def test_a_run_on_a_cpu_keeps_the_memory_that_its_steps_free(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("quatrain.training.process.keep_freed_memory", lambda: calls.append(1))
    go(tmp_path, 1)
    assert calls == [1]


def _moments_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "restore_optimizer", lambda model, optimizer, tensors: None)


def _rate_from_the_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "learning_rate", lambda s, optim, steps: learning_rate(s - 4, optim, steps))


def _dropout_unseeded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "derive", lambda seed, number, micro_step: torch.seed())


def _weights_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "load_model", lambda folder: GPT(load_model(folder).config))


@pytest.mark.parametrize("fault", [_moments_forgotten, _rate_from_the_start, _dropout_unseeded, _weights_forgotten])
def test_case_25_27_35_the_comparison_bites(
    go: Go, tmp_path: Path, plain: Path, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path, 4)
    with monkeypatch.context() as patch:
        fault(patch)
        go(tmp_path)
    assert rows_of(tmp_path)[:4] == rows_of(plain)[:4]
    assert losses(tmp_path)[4:] != losses(plain)[4:]
    assert weights(tmp_path, 8) != weights(plain, 8)


@pytest.mark.parametrize("forgotten", [{"rows_consumed": 0}, {"rows_consumed": 3 * 24}, {"next_batch": ""}])
def test_case_17_19_a_wrong_count_of_rows_is_refused_by_the_hash_of_the_next_batch(
    go: Go, tmp_path: Path, forgotten: dict[str, object]
) -> None:
    go(tmp_path, 4)
    folder = checkpoint_folder(tmp_path, 4)
    state = json.loads((folder / "trainer.json").read_text()) | forgotten
    (folder / "trainer.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["trainer.json"] = checkpoint._sha256(folder / "trainer.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="next batch"):
        go(tmp_path)


OTHER_ROWS: list[dict[str, object]] = [{"order": "sequential"}, {"data_seed": 7}, {"tokens_per_step": 12 * 16}]


def test_case_12_settings_that_decide_numbers_are_refused_at_resume(go: Go, tmp_path: Path) -> None:
    go(tmp_path, 4)
    before = content(tmp_path)
    others = [{"lr": 1e-3}, {"steps": 9}, {"seed": 7}, {"dropout": 0.0}, {"precision": "bf16"}, {"packing": "document"}]
    for change in OTHER_ROWS + others:
        with pytest.raises(DataError, match="began with other settings; set them back, or give another --out"):
            go(tmp_path, **change)
    assert content(tmp_path) == before
    assert go(tmp_path, precision="fp32", keep_last=9, eval_every=8, micro_batch=24)["step"] == 8


def test_case_12_another_order_or_seed_of_the_data_is_seen_in_the_next_batch_too(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "settings_sha256", lambda *sections: "the same")
    go(tmp_path, 4)
    for change in OTHER_ROWS:
        with pytest.raises(DataError, match="next batch"):
            go(tmp_path, **change)


def test_a_stop_before_the_first_step_resumes(go: Go, tmp_path: Path) -> None:
    go(tmp_path / "whole", eval_every=4)
    assert go(tmp_path / "parts", 0, eval_every=4)["train_loss"] is None
    assert steps_kept(tmp_path / "parts") == [0]
    go(tmp_path / "parts", eval_every=4)
    assert outcome(tmp_path / "parts", 8) == outcome(tmp_path / "whole", 8)


def test_a_stop_at_a_step_that_lies_behind_changes_nothing(go: Go, tmp_path: Path) -> None:
    go(tmp_path, 5)
    before = content(tmp_path)
    assert go(tmp_path, 3)["step"] == 5
    assert content(tmp_path) == before


def test_another_micro_batch_at_resume_keeps_rows_and_losses(go: Go, tmp_path: Path) -> None:
    go(tmp_path / "whole", steps=12, dropout=0.0)
    for stop_at, micro_batch in [(4, 12), (8, 24), (None, 3)]:
        go(tmp_path / "parts", stop_at, steps=12, dropout=0.0, micro_batch=micro_batch)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


# Validation and compilation leave training alone


def test_case_48_validation_changes_nothing_of_the_training(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for every in (5, 10, 0):
        go(tmp_path / str(every), steps=12, eval_every=every)
    assert weights(tmp_path / "5", 12) == weights(tmp_path / "10", 12) == weights(tmp_path / "0", 12)
    assert losses(tmp_path / "5") == losses(tmp_path / "10") == losses(tmp_path / "0")
    # The fault: one generator for all, seeded once, and a validation that draws from it.
    seed_once = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setattr(loop, "score", lambda *rest: Score(float(torch.rand(1)) + 1, 1))
    for name, every in [("with", 5), ("without", 0), ("again", 0)]:
        seed_once(1)
        go(tmp_path / name, steps=12, eval_every=every)
    assert weights(tmp_path / "with", 12) != weights(tmp_path / "without", 12) == weights(tmp_path / "again", 12)


@pytest.mark.soak  # a cold compilation takes half a minute
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own, 2.13
def test_case_34_45_49_a_compiled_step_trains_validates_and_saves_canonical_keys(go: Go, tmp_path: Path) -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no optional library: torch.compile needs a C++ compiler")
    settings = {"steps": 50, "dropout": 0.0, "eval_every": 25}
    go(tmp_path / "compiled", compile=True, **settings)
    go(tmp_path / "eager", **settings)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), abs=1e-3)
    assert rows_of(tmp_path / "compiled")[0] == rows_of(tmp_path / "eager")[0]  # validation is eager in both
    assert len(rows_of(tmp_path / "compiled", "samples.jsonl")) == 6
    stored = load_file(checkpoint_folder(tmp_path / "compiled", 50) / "model.safetensors")
    assert stored.keys() == load_file(checkpoint_folder(tmp_path / "eager", 50) / "model.safetensors").keys()


def test_case_34_what_a_compiled_step_saved_resumes_eagerly_and_back(
    go: Go, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function)
        # Without code generation: numbers stay the same to the bit.
        return cast(Callable[..., Any], torch_compile(function, backend="aot_eager"))

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    for stop_at, switch in [(3, True), (6, False), (None, True)]:
        go(tmp_path / "mixed", stop_at, compile=switch)
    assert outcome(tmp_path / "mixed", 8) == outcome(plain, 8)
    assert compiled == [loss_of, loss_of]  # of the function alone: the model keeps its names
    folder = checkpoint_folder(tmp_path / "mixed", 8)
    for name in ("model.safetensors", "trainer.safetensors"):
        assert not any("_orig_mod" in key for key in load_file(folder / name))
    fault = torch_compile(load_model(folder), backend="aot_eager").state_dict()  # what a compiled model would save
    assert all(name.startswith("_orig_mod.") for name in fault)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_model(folder).load_state_dict(fault)


def test_compile_where_there_is_no_compiler_is_refused_before_the_run_folder_exists(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quatrain.model.device.can_compile", lambda device: False)
    with pytest.raises(UsageError, match=r"train\.compile is true, and this machine has no compiler"):
        go(tmp_path / "run", compile=True)
    assert not (tmp_path / "run").exists()
    notes = Notes()
    assert go(tmp_path / "run", 0, notes, compile="auto")["step"] == 0
    assert notes.warned == []  # on a CPU nothing is lost


# Other data, other tokenizer, other folders


def test_case_23_another_store_is_refused_at_resume(go: Go, tmp_path: Path) -> None:
    go(tmp_path / "run", 4)
    prepare(["corpus:sonnets"], tmp_path / "other", PrepareConfig(tokenizer="char", val_docs=(6,)))
    before = content(tmp_path / "run")
    with pytest.raises(DataError, match="fingerprint") as raised:
        go(tmp_path / "run", store=str(tmp_path / "other"))
    assert raised.value.exit_code == 2
    assert content(tmp_path / "run") == before


def test_case_59_another_tokenizer_is_refused_at_resume(go: Go, tmp_path: Path) -> None:
    go(tmp_path / "run", 4)
    prepare(["corpus:sonnets"], tmp_path / "other", PrepareConfig(tokenizer="bytes", val_docs=(7,)))
    before = content(tmp_path / "run")
    with pytest.raises(DataError, match="another tokenizer") as raised:
        go(tmp_path / "run", store=str(tmp_path / "other"), vocab_size=257)
    assert raised.value.exit_code == 2
    assert content(tmp_path / "run") == before


def test_a_copy_of_the_store_elsewhere_is_the_same_store(
    go: Go, sonnets: TokenStore, tmp_path: Path, plain: Path
) -> None:
    go(tmp_path / "parts", 4)
    shutil.copytree(sonnets.folder, tmp_path / "copy")
    go(tmp_path / "parts", store=str(tmp_path / "copy"))
    assert outcome(tmp_path / "parts", 8) == outcome(plain, 8)


@pytest.mark.parametrize("foreign", ["thesis.tex", "model.pt"])
def test_a_foreign_folder_is_refused_untouched(go: Go, tmp_path: Path, foreign: str) -> None:
    (tmp_path / foreign).write_text("mine")
    with pytest.raises(DataError, match=foreign):
        go(tmp_path)
    assert content(tmp_path) == {foreign: b"mine"}
    assert names(tmp_path) == {foreign}


def test_a_split_shorter_than_a_window_is_refused_before_the_run_folder_exists(go: Go, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"4,378 ids.*5,001"):
        go(tmp_path / "run", seq_len=5000, block_size=5000)
    assert not (tmp_path / "run").exists()


# Damaged and removed checkpoints, rows cut back


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _missing(folder: Path) -> None:
    (folder / "trainer.safetensors").unlink()


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _nothing(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"")


@pytest.mark.parametrize("fault", [_truncated, _missing, _no_manifest, _nothing])
def test_case_29_30_a_damaged_newest_checkpoint_falls_back_and_is_written_again(
    go: Go, tmp_path: Path, undisturbed: tuple[object, ...], fault: Callable[[Path], None]
) -> None:
    go(tmp_path, **SAVING)
    newest = checkpoint_folder(tmp_path, 8)
    fault(newest)
    notes = Notes()
    go(tmp_path, watcher=notes, **SAVING)
    assert any(str(newest) in text and "falling back" in text for text in notes.said)
    assert any("step 6 of 8" in text for text in notes.said)
    assert outcome(tmp_path, 8) == undisturbed
    assert steps_kept(tmp_path) == [3, 6, 8]
    assert damage(newest) is None


def test_deleting_newer_checkpoints_is_a_way_back(go: Go, tmp_path: Path, undisturbed: tuple[object, ...]) -> None:
    go(tmp_path, **SAVING)
    for at in (6, 8):
        shutil.rmtree(checkpoint_folder(tmp_path, at))
    go(tmp_path, 5, **SAVING)
    assert max(row["step"] for row in rows_of(tmp_path)) == 5
    go(tmp_path, **SAVING)
    assert outcome(tmp_path, 8) == undisturbed


@pytest.mark.parametrize("at", [2, 3, 5, 7])
def test_case_30_after_a_kill_rows_are_cut_to_the_checkpoint_and_leftovers_go(
    go: Go, tmp_path: Path, undisturbed: tuple[object, ...], at: int
) -> None:
    with pytest.raises(SystemError):
        go(tmp_path, watcher=Notes(at, killed), **SAVING)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "tok')
    leftover = tmp_path / "checkpoints" / ".step_00000006.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    go(tmp_path, **SAVING)
    assert outcome(tmp_path, 8) == undisturbed
    assert not leftover.exists()


def test_keep_last_and_keep_every(go: Go, tmp_path: Path) -> None:
    go(tmp_path, save_every=1, keep_last=2, keep_every=3)
    assert steps_kept(tmp_path) == [3, 6, 7, 8]


def test_keep_best_keeps_the_lowest_validation_loss_also_over_a_resume(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([5.0, 4.0, 3.0, 2.0, 2.5, 2.2, 2.1, 3.0, 4.0])  # steps 0..8, the lowest at 3
    monkeypatch.setattr(loop, "score", lambda *rest: Score(next(measured), 1))
    for stop_at in (5, None):
        go(tmp_path, stop_at, save_every=1, eval_every=1, keep_last=1, keep_best=True)
    assert steps_kept(tmp_path) == [3, 8]


def test_save_every_0_saves_the_last_step_alone(go: Go, tmp_path: Path) -> None:
    go(tmp_path)
    assert steps_kept(tmp_path) == [8]


# Signals


def _in_a_step(patch: pytest.MonkeyPatch, number: int) -> None:
    hidden, calls = GPT.hidden, iter(range(10**6))

    def interrupted(self: GPT, *rest: object) -> torch.Tensor:
        if self.training and next(calls) == 7:  # the second micro-step of step 4
            signal.raise_signal(number)
        return hidden(self, *rest)

    patch.setattr(GPT, "hidden", interrupted)


def _at(place: object, name: str, nth: int) -> Callable[[pytest.MonkeyPatch, int], None]:
    """Raise the signal at the beginning of the n-th call of a function."""

    def plant(patch: pytest.MonkeyPatch, number: int) -> None:
        original, calls = getattr(place, name), iter(range(10**6))

        @functools.wraps(original)
        def interrupted(*rest: object) -> object:
            if next(calls) == nth:
                signal.raise_signal(number)
            return original(*rest)

        patch.setattr(place, name, interrupted)

    return plant


MOMENTS = {
    "in a step": (_in_a_step, 4),
    "in the first validation": (_at(loop, "score", 0), 0),
    "in a later validation": (_at(loop, "score", 2), 4),
    "while it samples": (_at(loop, "generate", 1), 2),
    "while it saves": (_at(loop, "save_checkpoint", 1), 6),
    "between steps": (_at(loop, "learning_rate", 4), 5),
}


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [(moment, signal.SIGTERM, 143) for moment in MOMENTS]
    + [(moment, signal.SIGINT, 130) for moment in ("in a step", "in a later validation")],
)
def test_case_33_a_signal_is_granted_at_the_end_of_the_step_with_the_work_saved(
    go: Go,
    tmp_path: Path,
    undisturbed: tuple[object, ...],
    moment: str,
    number: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant, at = MOMENTS[moment]
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        plant(patch, number)
        with pytest.raises(Stopped, match=f"step {at} of 8") as raised:
            go(tmp_path, **SAVING)
    assert raised.value.exit_code == code
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert steps_kept(tmp_path)[-1] == at
    assert damage(checkpoint_folder(tmp_path, at)) is None
    go(tmp_path, **SAVING)
    assert outcome(tmp_path, 8) == undisturbed


def test_case_33_a_validation_that_a_signal_ends_early_leaves_no_row_and_is_made_up_for(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _at(loop, "score", 1)(patch, signal.SIGTERM)
        with pytest.raises(Stopped):
            go(tmp_path, eval_every=4)
    assert [row["step"] for row in rows_of(tmp_path) if "val_loss" in row] == [0]
    assert {row["step"] for row in rows_of(tmp_path, "samples.jsonl")} == {0}
    go(tmp_path, eval_every=4)
    assert [row["step"] for row in rows_of(tmp_path) if "val_loss" in row] == [0, 4, 8]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 128 + signal.SIGHUP)]
)
def test_signals_that_come_together_are_one_wish_and_the_work_is_saved(
    go: Go, tmp_path: Path, undisturbed: tuple[object, ...], number: int, code: int
) -> None:
    def launcher() -> None:
        for _ in range(3):  # to the process, to its group, and once more
            signal.raise_signal(number)

    with pytest.raises(Stopped, match="step 5 of 8") as raised:
        go(tmp_path, watcher=Notes(5, launcher), **SAVING)
    assert raised.value.exit_code == code
    assert steps_kept(tmp_path) == [3, 5]
    go(tmp_path, **SAVING)
    assert outcome(tmp_path, 8) == undisturbed


def test_a_second_ctrl_c_ends_the_step_at_once_and_the_run_can_still_go_on(
    go: Go, tmp_path: Path, undisturbed: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "IMPATIENT", 0.0)

    def impatient() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, watcher=Notes(5, impatient), **SAVING)
    assert steps_kept(tmp_path) == [3]
    go(tmp_path, **SAVING)
    assert outcome(tmp_path, 8) == undisturbed


# What must not go on


@pytest.mark.parametrize(
    ("at", "eval_every", "message"),
    [
        (5, 0, "step 6: loss is nan"),
        (4, 0, "step 4: weights are not finite; not saved, the last checkpoint is as good as it was"),
        (4, 2, "step 4: validation loss is nan"),
    ],
)
def test_case_40_a_poisoned_weight_stops_the_run_with_the_last_checkpoint_good(
    sonnets: TokenStore, tmp_path: Path, at: int, eval_every: int, message: str
) -> None:
    model_config, optim, data, config = sections(sonnets, save_every=2, eval_every=eval_every)
    model = GPT(model_config)

    def poison() -> None:
        model.get_parameter("transformer.h.0.mlp.c_fc.weight").data[0, 0] = float("nan")

    loader = Loader(sonnets.train, data, sonnets.eot)
    trainer = Trainer(model, loader, sonnets, optim, config, tmp_path, "# mine\n", Notes(at, poison))
    with pytest.raises(QuatrainError, match=message) as raised:
        trainer.run()
    assert raised.value.exit_code == 1
    assert len(losses(tmp_path)) == at
    assert steps_kept(tmp_path) == [saved for saved in (2, 4) if saved < at]
    newest = checkpoint_folder(tmp_path, steps_kept(tmp_path)[-1])
    assert all(parameter.isfinite().all() for parameter in load_model(newest).parameters())
    assert names(tmp_path / "checkpoints") == {path.name for _, path in checkpoints(tmp_path)}
    assert (tmp_path / "recipe.toml").read_text() == "# mine\n"


@pytest.mark.parametrize(("loss", "warned"), [(0.099, True), (0.1, False), (2.0, False)])
def test_a_validation_loss_that_is_too_good_is_warned_of(
    go: Go, tmp_path: Path, loss: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "score", lambda *rest: Score(loss * 100, 100))
    notes = Notes()
    go(tmp_path, steps=1, eval_every=1, watcher=notes)
    assert any("too good to be true" in text for text in notes.warned) == warned
    assert len(notes.warned) == (2 if warned else 0)  # at step 0 and at the last


def test_validation_text_that_stands_in_train_is_warned_of(go: Go, tmp_path: Path) -> None:
    notes = Notes()
    go(tmp_path / "honest", steps=1, watcher=notes)
    assert notes.warned == []
    secret = "When in the chronicle of wasted time I see descriptions of ladies dead. " * 3
    (tmp_path / "val.txt").write_text(secret)
    (tmp_path / "train.txt").write_text("And beauty making beautiful old rhyme, " + secret + "and lovely knights")
    config = PrepareConfig(tokenizer="char", val=(str(tmp_path / "val.txt"),))
    prepare([str(tmp_path / "train.txt")], tmp_path / "store", config)
    leaky = TokenStore(tmp_path / "store")
    go(tmp_path / "leaky", steps=1, store=str(leaky.folder), vocab_size=leaky.vocab_size, watcher=notes)
    (warning,) = notes.warned
    assert "validation spans stand word for word in train" in warning


@pytest.mark.parametrize(("mlp", "said"), [("gelu_tanh", False), ("swiglu", True)])
def test_switches_that_no_class_expresses_are_said_before_step_0(go: Go, tmp_path: Path, mlp: str, said: bool) -> None:
    notes = Notes()
    go(tmp_path, steps=1, mlp=mlp, watcher=notes)
    assert any("model_type 'quatrain'" in text for text in notes.said) == said
    config = json.loads((checkpoint_folder(tmp_path, 1) / "config.json").read_text())
    assert config["model_type"] == ("quatrain" if said else "gpt2")
