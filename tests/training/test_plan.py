"""A plan's figures against counts made by hand, and against what real checkpoints take."""

import math
from dataclasses import replace

import pytest
import torch

from quatrain.errors import ConfigError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.tokens.config import DataConfig
from quatrain.training.calibration import STEPS, Clock, calibrate
from quatrain.training.checkpoint import prune
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.machines import GIB, MACHINES, Machine, named_like, this_cpu
from quatrain.training.optim import build_optimizer, optimizer_tensors
from quatrain.training.plan import Planned, Speed, checkpoint_bytes, checkpoints_kept, plan, true_shapes

TRAIN = TrainConfig(steps=19_073, micro_batch=16, precision="bf16", save_every=1000)
GPT2 = Planned(ModelConfig(vocab_size=50257), OptimConfig(), DataConfig(), TRAIN, MACHINES["h100"])
TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=100)
CPU = Machine("this machine's CPU", 8 * GIB, 0.95, {"fp32": 1e9}, None, None)


def with_train(wanted: Planned, **values: object) -> Planned:
    return replace(wanted, train=replace(wanted.train, **values))


def test_gpt2_is_counted_as_published() -> None:
    facts = plan(GPT2)
    assert facts["parameters"]["total"] == 124_439_808
    assert facts["parameters"]["without_embeddings"] == 124_439_808 - 50_257 * 768 - 1024 * 768
    assert facts["data"]["tokens"] == 19_073 * 524_288
    assert facts["data"]["tokens_per_parameter"] == pytest.approx(80.36, abs=0.01)
    assert facts["flops"]["total"] == facts["flops"]["per_token"] * 19_073 * 524_288
    assert facts["micro_batch"]["grad_accum_steps"] == 32
    assert facts["communication"] is None


def test_hours_are_flops_over_what_the_devices_reach() -> None:
    facts = plan(replace(GPT2, gpus=8), mfu=0.5, price=3.0)
    hours = facts["flops"]["total"] / (8 * 0.5 * 989.4e12) / 3600
    assert facts["time"]["hours"] == pytest.approx(hours)
    assert facts["time"]["gpu_hours"] == pytest.approx(8 * hours)
    assert facts["time"]["cost"] == pytest.approx(24 * hours)
    assert facts["time"]["mfu"] == pytest.approx(0.5)


def test_a_measured_speed_counts_its_first_step_apart() -> None:
    facts = plan(GPT2, speed=Speed(100.0, 2.0, 262_144.0, "measured"))
    assert facts["time"]["hours"] == pytest.approx((100 + 19_072 * 2) / 3600)


def test_without_a_known_peak_there_are_no_hours_and_no_interruptions() -> None:
    facts = plan(with_train(replace(GPT2, machine=replace(CPU, peaks={}, memory=None)), micro_batch=1))
    assert facts["time"]["hours"] is None
    assert "--calibrate" in facts["time"]["source"]
    assert facts["interruptions"] is None


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_takes_the_bytes_that_are_written(kind: str) -> None:
    model = GPT(TINY)
    optimizer = build_optimizer(model, OptimConfig(kind=kind))
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    written = sum(4 * tensor.numel() for tensor in optimizer_tensors(model, optimizer).values() if tensor.dim())
    planned = replace(GPT2, model=TINY, optim=OptimConfig(kind=kind))
    weights, moments = checkpoint_bytes(planned, true_shapes(TINY))
    assert moments == written
    assert weights == 4 * sum(weight.numel() for weight in model.parameters()) - 4 * 28 * 32  # rows of padding


@pytest.mark.parametrize(
    ("steps", "save_every", "keep_last", "keep_every"),
    [(10, 3, 3, 0), (10, 3, 2, 3), (10, 0, 3, 2), (12, 3, 1, 6), (2, 5, 3, 0), (12, 2, 3, 4)],
)
def test_as_many_checkpoints_are_kept_as_pruning_leaves(
    steps: int, save_every: int, keep_last: int, keep_every: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("quatrain.training.checkpoint.damage", lambda folder: None)
    config = TrainConfig(steps=steps, save_every=save_every, keep_last=keep_last, keep_every=keep_every)
    for step in range(1, steps + 1):
        if step == steps or (save_every and step % save_every == 0):
            (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
            prune(tmp_path, keep_last, keep_every, [])
    assert checkpoints_kept(config) == len(list((tmp_path / "checkpoints").iterdir()))


def test_a_ring_sends_all_but_a_share_twice() -> None:
    two, sixteen = (plan(replace(GPT2, gpus=gpus))["communication"] for gpus in (2, 16))
    assert two["bytes_per_step"] == 4 * 124_439_808
    assert two["seconds_per_step"] == pytest.approx(4 * 124_439_808 / 450e9)
    assert sixteen["bytes_per_step"] == pytest.approx(2 * 15 / 16 * 4 * 124_439_808)
    assert sixteen["bytes_per_second"] == 50e9  # the slowest part of the ring: between machines
    assert plan(replace(GPT2, gpus=16, machine=MACHINES["4090"]))["communication"]["seconds_per_step"] is None


def test_interruptions_come_at_the_rate_of_llama_3_s_training() -> None:
    one, many = (plan(replace(GPT2, gpus=gpus))["interruptions"] for gpus in (1, 32))
    assert one["hours_between"] == pytest.approx(54 * 24 * 16_384 / 419)
    assert many["hours_between"] == pytest.approx(one["hours_between"] / 32)
    step = plan(replace(GPT2, gpus=32))["time"]["seconds_per_step"]
    assert many["lost_hours_each"] == pytest.approx(500 * step / 3600)
    best = math.sqrt(2 * many["seconds_to_save"] * many["hours_between"] * 3600) / step
    assert many["best_save_every"] == min(19_073, round(best))


def test_epochs_are_of_the_training_split_and_many_are_remarked() -> None:
    few, many = (plan(GPT2, store=ids)["data"] for ids in (5_000_000_000, 2_000_000_000))
    assert (few["epochs"], few["many_epochs"]) == (pytest.approx(2.0, abs=1e-3), False)
    assert many["many_epochs"]
    assert plan(GPT2, store=1000)["disk"]["store"] == 2000
    wide = replace(GPT2, model=replace(GPT2.model, vocab_size=65_537))
    assert plan(wide, store=1000)["disk"]["store"] == 4000


def test_the_largest_micro_batch_fits_and_divides_the_step() -> None:
    facts = plan(GPT2)["micro_batch"]
    assert 512 % facts["largest"] == 0
    assert facts["largest_needs"] <= 0.9 * 80 * GIB < GPT2.memory(2 * facts["largest"]).peak


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (replace(GPT2, gpus=7), ["--gpus is 7", "nearest: 4 or 8"]),
        (with_train(GPT2, micro_batch=48), ["micro_batch 48 does not divide the 512 sequences", "nearest: 32 or 64"]),
        (with_train(replace(GPT2, gpus=8), micro_batch=128), ["the 64 sequences", "8 devices; nearest: 64"]),
        (
            with_train(GPT2, micro_batch=512),
            ["micro_batch 512 needs", "72.00 GiB", "the largest that fits and divides"],
        ),
        (
            replace(GPT2, model=replace(GPT2.model, n_layer=48, n_embd=1600, n_head=25), machine=MACHINES["4090"]),
            ["1,557,611,200 parameters needs", "--model.n-layer", "or --gpu h100, h200, a100"],
        ),
        (
            with_train(replace(GPT2, gpus=3, machine=MACHINES["4090"]), micro_batch=256),
            ["2 mistakes", "--gpus is 3", "micro_batch 256 needs"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(wanted: Planned, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(wanted)
    for part in expected:
        assert part in str(refused.value)


def test_the_nearest_number_of_layers_fits_and_one_more_does_not() -> None:
    deep = replace(GPT2, model=replace(GPT2.model, n_layer=170), machine=MACHINES["4090"])
    with pytest.raises(ConfigError, match=r"--model.n-layer \d+") as refused:
        plan(deep)
    layers = int(str(refused.value).split("--model.n-layer ")[1].split()[0])
    needs = [replace(deep, model=replace(deep.model, n_layer=n)).memory(1).peak for n in (layers, layers + 1)]
    assert needs[0] <= deep.usable < needs[1]


def test_devices_are_known_by_their_cuda_names_and_a_cpu_by_its_memory() -> None:
    assert named_like("NVIDIA H100 80GB HBM3") == "h100"
    assert named_like("NVIDIA GeForce RTX 4090") == "4090"
    assert named_like("Tesla T4") is None
    memory = this_cpu({}).memory
    assert memory is None or memory > GIB // 4


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_calibration_runs_the_recipe_s_own_steps(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from quatrain.training import calibration

    ran: list[int] = []

    class Counted(calibration.Step):
        def __call__(self, step, lr, batches, valid, momentum=0.95):
            taken = list(batches)
            ran.append(len(taken))
            assert valid == sum(batch.valid for batch in taken)
            return super().__call__(step, lr, taken, valid, momentum)

    monkeypatch.setattr(calibration, "Step", Counted)
    train = TrainConfig(tokens_per_step=128, micro_batch=micro_batch, precision="fp32")
    speed = calibrate(Planned(TINY, OptimConfig(), DataConfig(seq_len=32), train, CPU), torch.device("cpu"))
    assert ran == [min(2, 4 // micro_batch)] * (STEPS + 1)
    assert speed.tokens_per_second == pytest.approx(128 / speed.step)
    assert "random ids" in speed.source


def test_micro_steps_that_were_not_run_count_as_the_second() -> None:
    assert Clock(first=3.0, further=2.0, update=10.0).step(4) == 3 + 3 * 2 + 10
