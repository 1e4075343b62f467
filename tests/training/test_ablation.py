"""The ladder is trained at equal tokens, once; what interrupts it loses nothing."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from test_loop import sections

from quatrain.errors import QuatrainError, Stopped, UsageError
from quatrain.model.pretrained import parameter_count
from quatrain.tokens.store import TokenStore
from quatrain.training import ablation
from quatrain.training.ablation import DIVERGED, Trial, ablate, quick
from quatrain.training.checkpoint import checkpoints
from quatrain.training.comparison import Comparison
from quatrain.training.loop import train
from quatrain.training.metrics import JsonLines, Row
from quatrain.training.progress import Silent

SEEDS = (42, 43)
TINY = {"steps": 6, "eval_every": 2, "tokens_per_step": 64, "micro_batch": 4}


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Whether bytes survive a power cut is not asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def trials(store: TokenStore, folder: Path, **variants: dict[str, object]) -> list[Trial]:
    """The base, and variants by the settings in which they differ."""
    runs = []
    for name, changes in {"base": {}, **variants}.items():
        for seed in SEEDS:
            values = TINY | {"seed": seed, "data_seed": 1337 + seed} | changes
            model, optim, data, config = sections(store, **values)
            place = folder / name / f"seed_{seed}"
            runs.append(Trial(name, place, model, optim, data, quick(config), "# recipe\n", "cpu"))
    return runs


def losses(comparison: Comparison) -> dict[str, tuple[float | None, ...]]:
    return {row.variant: row.losses for row in comparison.rows}


@pytest.fixture(scope="module")
def whole(sonnets: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Trial], Comparison]:
    """An ablation that nothing disturbed; not to be written into."""
    runs = trials(sonnets, tmp_path_factory.mktemp("whole"), hot={"lr": 3e-2}, wide={"mlp": "swiglu"})
    return runs, ablate(runs)


def test_each_number_is_that_of_the_run_trained_on_its_own(sonnets, whole, tmp_path):
    runs, comparison = whole
    run = runs[-1]
    alone = train(run.model, run.optim, run.data, run.train, tmp_path / "alone", "# recipe\n", "cpu")
    row = comparison.rows[-1]
    assert row.losses[-1] == alone["val_loss"]
    assert row.parameters == parameter_count(run.model)
    trained = [JsonLines(one.folder / "metrics.jsonl").trained() for one in runs[-2:]]
    assert row.train_loss == pytest.approx(fmean(rows[-1]["loss"] for rows in trained))
    assert [point.tokens for point in row.curve] == [0, 128, 256, 384]


def test_seeds_differ_and_variants_share_them(whole):
    found = losses(whole[1])
    assert list(found) == ["base", "hot", "wide"]
    assert len({loss for row in found.values() for loss in row}) == 6


def test_only_the_last_checkpoint_is_kept_and_nothing_is_sampled(whole):
    for run in whole[0]:
        assert [step for step, _ in checkpoints(run.folder)] == [6]
        assert not (run.folder / "samples.jsonl").exists()


def test_what_is_finished_is_not_trained_again(whole, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(ablation, "train", None)
    assert ablate(whole[0], report=told.append) == whole[1]
    assert sum("(finished before)" in line for line in told) == 6


def test_the_noise_is_told_as_soon_as_the_base_is_trained(whole):
    told: list[str] = []
    ablate(whole[0], report=told.append)
    noise = whole[1].noise
    assert told[2].startswith(f"noise of the base over 2 seeds: validation loss {noise.val_loss:.4f}")
    assert "over 100 of the" in told[2]
    assert f"a difference below {noise.threshold:.4f} is noise" in told[2]


def test_the_base_comes_first_wherever_its_runs_stand(whole):
    runs = whole[0]
    told: list[str] = []
    ablate([runs[0], *runs[2:], runs[1]], report=told.append)
    assert [line.startswith("[") and "base" in line for line in told[:2]] == [True, True]


def test_more_seeds_and_more_variants_go_on_from_what_is_there(sonnets, tmp_path, monkeypatch):
    begun = trials(sonnets, tmp_path, hot={"lr": 3e-2})
    first = [run for run in begun if run.train.seed == 42]
    ablate(first)
    trained: list[str] = []

    def counted(*words: object) -> dict[str, object]:
        trained.append(str(words[4]))
        return train(*words)

    monkeypatch.setattr(ablation, "train", counted)
    ablate(begun)
    assert trained == [str(run.folder) for run in begun if run.train.seed == 43]


class Signalling(Silent):
    """Sends a signal in a step of the run of this number."""

    def __init__(self, run: int, step: int) -> None:
        self.run, self.step, self.begun = run, step, 0

    def begin(self, step: int, steps: int) -> None:
        self.begun += 1

    def trained(self, row: Row) -> None:
        if (self.begun, row["step"]) == (self.run, self.step):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_signal_saves_what_is_done_and_the_same_call_ends_like_one_undisturbed(sonnets, whole, tmp_path, step):
    runs = trials(sonnets, tmp_path, hot={"lr": 3e-2}, wide={"mlp": "swiglu"})
    watcher = Signalling(2, step)
    with pytest.raises(Stopped, match="the same command goes on") as stopped:
        ablate(runs, watcher=watcher)
    assert stopped.value.exit_code == 130
    assert watcher.begun == 2
    assert [saved for saved, _ in checkpoints(runs[1].folder)] == [step]
    assert losses(ablate(runs)) == losses(whole[1])


def test_a_variant_that_diverges_is_a_row_and_is_not_trained_again(sonnets, tmp_path, monkeypatch):
    runs = trials(sonnets, tmp_path, hot={"lr": 1e38, "warmup": 0, "clip": 0.0}, warm={"lr": 2e-2})
    comparison = ablate(runs)
    assert [row.verdict == "diverged" for row in comparison.rows] == [False, True, False]
    assert losses(comparison)["hot"] == (None, None)
    assert all("not finite" in message or "nan" in message for message in comparison.rows[1].diverged)
    assert (runs[2].folder / DIVERGED).is_file()
    monkeypatch.setattr(ablation, "train", None)
    assert ablate(runs) == comparison


def test_a_base_that_diverges_ends_it_before_the_variants_are_trained(sonnets, tmp_path):
    runs = trials(sonnets, tmp_path, calm={})
    hot = [replace(run, optim=replace(run.optim, lr=1e38, warmup=0, clip=0.0)) for run in runs[:2]]
    with pytest.raises(QuatrainError, match="the base itself diverged"):
        ablate([*hot, *runs[2:]])
    assert not runs[2].folder.exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps": 7}, "x: its steps and tokens_per_step are not the base's"),
        ({"tokens_per_step": 128}, "x: its steps and tokens_per_step are not the base's"),
        ({"eval_every": 0}, "x: train.eval_every is 0"),
        ({"seed": 9}, r"x: its seeds are \[9, 9\], the base's \[42, 43\]"),
        ({"seq_len": 10**6, "block_size": 10**6}, "a window of seq_len 1000000 needs 1,000,001"),
    ],
)
def test_what_is_no_fair_comparison_or_cannot_be_is_refused_before_anything_is_trained(
    sonnets, tmp_path, changes, expected
):
    with pytest.raises(UsageError, match=expected):
        ablate(trials(sonnets, tmp_path, x=changes))
    assert not list(tmp_path.iterdir())


def test_a_finished_run_of_other_settings_is_refused(sonnets, tmp_path):
    ablate(trials(sonnets, tmp_path))
    others = [replace(run, optim=replace(run.optim, lr=0.5)) for run in trials(sonnets, tmp_path)]
    with pytest.raises(UsageError, match="began with other settings"):
        ablate(others)
