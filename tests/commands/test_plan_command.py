from pathlib import Path

import pytest

from test_cli import TINY, done, files_in, refused

ON_CPU = ["--gpu", "cpu"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_plan_for_gpus_is_told_part_by_part_and_writes_nothing():
    answer = done("plan", "gpt2", "--gpu", "h100", "--gpus", "8", "--price", "2.5")
    for line in (
        "vocab_size is the store's; assuming 50,257 (GPT-2's)",
        "8 x NVIDIA H100 80GB, bf16",
        "124,439,808, 85,056,000 without embeddings",
        "of the optimizer",
        "assumed MFU 0.37 (430,000 tokens/s",
        " USD for ",
        "20 would be 2,488,796,160",
        "sent by each a step",
        "Grattafiori et al. 2024",
    ):
        assert line in answer.out
    assert not files_in(Path.cwd())


def test_json_holds_every_part():
    answer = done("plan", "gpt2", "--gpu", "a100", "--json")
    assert set(answer.json) == {
        "device", "gpus", "precision", "parameters", "flops", "memory", "micro_batch", "time", "disk", "data",
        "communication", "interruptions",
    }  # fmt: skip
    assert answer.json["device"] == "NVIDIA A100 80GB"
    assert answer.json["time"]["cost"] is None
    assert len(answer.out.splitlines()) == 1


def test_a_store_gives_vocabulary_and_epochs(sonnets):
    answer = done("plan", "sonnets", "--data", sonnets.folder, *ON_CPU)
    assert "assuming" not in answer.out
    assert "Muennighoff et al. 2023" in answer.out
    told = done("plan", "sonnets", "--data", sonnets.folder, *ON_CPU, "--json").json
    assert told["data"]["epochs"] == pytest.approx(1000 * 1024 / len(sonnets.train))


def test_settings_change_the_plan():
    small = done("plan", "gpt2", "--gpu", "h100", "--model.n-layer", "6", "--json").json
    assert small["parameters"]["without_embeddings"] == pytest.approx(85_056_000 / 2, rel=1e-3)


def test_calibrate_measures_steps_of_the_store_and_writes_nothing(sonnets):
    plan = done("plan", "sonnets", "--data", sonnets.folder, *ON_CPU, "--calibrate", *TINY, "--json").json
    assert plan["time"]["source"] == "measured in 20 steps on this machine, of the store"
    assert plan["time"]["hours"] > 0
    assert not files_in(Path.cwd())


def test_all_mistakes_are_told_at_once():
    message = refused(
        "plan", "gpt2", "--gpus", "0", "--mfu", "2", "--price=-1", "--calibrate", "--data.seq-len", "2048"
    )
    for part in ("5 mistakes", "--gpus is 0", "--mfu is 2.0", "--price is -1.0", "give one of them", "block_size 1024"):
        assert part in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gpt2", "--gpu", "h100", "--gpus", "7"], "nearest: 4 or 8"),
        (["gpt2-xl", "--gpu", "4090"], "nearest that fits: --model.n-layer"),
        (["gpt2", "--gpu", "h100", "--train.micro-batch", "512"], "the largest that fits and divides: 128"),
        (["gpt2", "--gpu", "cpu", "--gpus", "2"], "a plan for CPUs is for one machine; nearest: 1"),
        (["gpt2", "--gpu", "v100"], '"v100"'),
        (["gpt2", "--gpu", "h100", "--prise", "3"], "did you mean '--price'?"),
        (["gpt2", "--gpu", "h100", "--calibrate"], "--calibrate measures this machine's device"),
        (["gpt2", "--gpu", "cpu", "--train.precision", "fp16"], "fp16 gains nothing on a CPU"),
        (["gpt3", "--gpu", "cpu"], "no recipe 'gpt3' (did you mean 'gpt2'?)"),
        (["gpt2", "--data", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_is_exit_2(words, expected):
    assert expected in refused("plan", *words)


def test_a_vocabulary_that_is_not_the_store_s_is_exit_2(sonnets):
    assert "the store's tokenizer has" in refused(
        "plan", "sonnets", "--data", sonnets.folder, "--model.vocab-size", "99", *ON_CPU
    )
