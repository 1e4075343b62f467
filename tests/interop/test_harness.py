"""lm-eval over a run: the scores of its own Hugging Face backend on the same checkpoint folder."""

import json
from pathlib import Path

import pytest
import torch

from quatrain.errors import UsageError
from quatrain.interop.harness import adapter, run_tasks
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import save_model
from quatrain.text.tokenizers import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's and its dependencies' own

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: label
doc_to_choice: endings
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{context}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def network() -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=96, vocab_size=257)
    model = GPT(config, torch.Generator().manual_seed(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


def test_scores_are_those_of_the_hf_backend(network: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts with trailing spaces, empty ones and ones longer than the model; sums to 1e-6 and every decision."""
    lm_eval = pytest.importorskip("lm_eval", reason="no optional library: lm-eval")
    pytest.importorskip("accelerate", reason="no optional library: accelerate")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "context": "word " * (n % 25) + f"number {n}" + " " * (n % 3),
            "endings": ["a b", "c", f"é {n}", "long one"],
            "label": n % 4,
        }
        for n in range(40)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in (("choice", CHOICE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(task.format(file=file))
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(network, ByteTokenizer(), folder)
    names = ["local_choice", "local_rolling"]
    ours = run_tasks(network, ByteTokenizer(), names, task_manager=manager)
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        device="cpu",
        batch_size=1,
        tasks=names,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
    )
    compared = 0
    for name in names:
        for metric, score in ours[f"lm_eval:{name}"]["scores"].items():
            assert score["value"] == pytest.approx(theirs["results"][name][f"{metric},none"], rel=1e-6), metric
            assert score["count"] == 40
            assert score["context_length"] == 96
            compared += 1
    assert compared == 4


def test_a_task_that_lm_eval_does_not_know_is_refused(network: GPT) -> None:
    pytest.importorskip("lm_eval", reason="no optional library: lm-eval")
    from lm_eval.tasks import TaskManager

    with pytest.raises(UsageError, match="has no task 'helaswag'"):
        run_tasks(network, ByteTokenizer(), ["helaswag"], task_manager=TaskManager(include_defaults=False))


def test_generation_stops_at_its_texts_and_fits_a_context_that_is_too_long(network: GPT) -> None:
    pytest.importorskip("lm_eval", reason="no optional library: lm-eval")

    class Request:
        def __init__(self, *args: object) -> None:
            self.args = args

    ours = adapter(network, ByteTokenizer())
    (whole,) = ours.generate_until([Request("x" * 300, {"until": [], "max_gen_toks": 12})])
    assert 0 < len(whole.encode("utf-8", "replace")) <= 36
    (cut,) = ours.generate_until([Request("x" * 300, {"until": [whole[1:3]], "max_gen_toks": 12})])
    assert cut == whole[: whole.index(whole[1:3])]
