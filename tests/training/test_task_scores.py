"""Tasks scored inside a training: logged at each validation, and nothing of the training is another for it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from conftest import shared_file
from quatrain.errors import DataError, UsageError
from quatrain.inference.tasks import evaluate_task, named_task
from quatrain.model.config import ModelConfig
from quatrain.model.loss import loss_of
from quatrain.model.pretrained import load_model
from quatrain.tokens.config import DataConfig, PrepareConfig
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare
from quatrain.training.checkpoint import checkpoint_folder
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.loop import train
from quatrain.training.metrics import JsonLines

ITEMS = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The sonnets as bytes: HellaSwag has other characters than they have."""
    folder = tmp_path_factory.mktemp("bytes") / "store"
    prepare(["corpus:sonnets"], folder, PrepareConfig(tokenizer="bytes", val_docs=(7,)))
    return TokenStore(folder)


def run_in(folder: Path, store: TokenStore, tasks: str, **changes: Any) -> bytes:
    """Train 6 steps with validations at 0, 3 and 6; returns weights and moments."""
    model = ModelConfig(
        n_layer=1, n_head=2, n_embd=16, block_size=512, vocab_size=store.tokenizer.vocab_size, dropout=0.1
    )
    settings = {"steps": 6, "tokens_per_step": 256, "micro_batch": 2, "eval_every": 3, "save_every": 0, "samples": 0}
    config = TrainConfig(
        **settings | {"precision": "fp32", "compile": False, "eval_items": ITEMS} | changes, eval_tasks=tasks
    )
    data = DataConfig(store=str(store.folder), seq_len=64)
    train(model, OptimConfig(lr=1e-2), data, config, folder, "# recipe\n", "cpu")
    last = checkpoint_folder(folder, 6)
    return b"".join((last / name).read_bytes() for name in ("model.safetensors", "trainer.safetensors"))


def check(tmp_path: Path, store: TokenStore, **changes: Any) -> None:
    file = shared_file("hellaswag_val.jsonl.gz")
    assert run_in(tmp_path / "with", store, f"hellaswag={file}", **changes) == run_in(
        tmp_path / "without", store, "", **changes
    )
    rows = JsonLines(tmp_path / "with" / "metrics.jsonl").validated()
    assert [row["step"] for row in rows] == [0, 3, 6]
    assert all("tasks" not in row for row in JsonLines(tmp_path / "without" / "metrics.jsonl").validated())
    given = named_task("hellaswag", file, ITEMS)
    expected = evaluate_task(load_model(checkpoint_folder(tmp_path / "with", 6)), store.tokenizer, given)
    found = rows[-1]["tasks"]["hellaswag"]
    assert {name: found[name] for name in expected["scores"]} == {
        name: score["value"] for name, score in expected["scores"].items()
    }
    assert (found["count"], found["context_length"], found["data_hash"]) == (ITEMS, 512, given.data_hash)


def test_case_48_49_hellaswag_beside_a_compiled_step_leaves_weights_bit_equal(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by torch's own tracer, which a compiler follows in the soak test; the loss alone is compiled."""
    compiled: list[object] = []
    torch_compile = torch.compile

    def traced(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
        compiled.append(function)
        return cast(Callable[..., Any], torch_compile(function, backend="aot_eager"))

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr("quatrain.model.device.can_compile", lambda device: True)
    check(tmp_path, store, compile=True)
    assert compiled == [loss_of, loss_of]


@pytest.mark.soak  # a cold compilation takes half a minute
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own, 2.13
def test_case_48_49_hellaswag_beside_a_really_compiled_step(store: TokenStore, tmp_path: Path) -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no optional library: torch.compile needs a C++ compiler")
    check(tmp_path, store, compile=True)


def test_the_equality_bites_where_a_task_draws(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: one generator for all, seeded once, and a task that draws from it."""
    file = shared_file("hellaswag_val.jsonl.gz")
    torch.manual_seed(1)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setattr("quatrain.inference.tasks.answer", lambda *rest: torch.rand(1) and None)
    state = torch.get_rng_state()
    disturbed = run_in(tmp_path / "with", store, f"hellaswag={file}")
    torch.set_rng_state(state)
    assert disturbed != run_in(tmp_path / "without", store, "")


def test_a_task_that_is_not_there_is_refused_before_the_run_folder_exists(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no task 'helaswag'"):
        run_in(tmp_path / "run", store, "helaswag")
    assert not (tmp_path / "run").exists()


def test_a_question_that_the_tokenizer_cannot_spell_is_refused_before_the_run_folder_exists(
    sonnets: TokenStore, tmp_path: Path
) -> None:
    tasks = f"hellaswag={shared_file('hellaswag_val.jsonl.gz')}"
    with pytest.raises(DataError, match=r"task hellaswag, question 13: character 'z' \(U\+007A .* at position 14"):
        run_in(tmp_path / "run", sonnets, tasks, eval_items=40)
    assert not (tmp_path / "run").exists()
