"""Samples that come and go beside each other are those that are written alone."""

import pytest
import torch
from test_engine import small
from test_sampling import LETTERS

from quatrain.inference.batch import Batch, Sample, Writing, seen_end
from quatrain.inference.config import SamplingConfig
from quatrain.inference.engine import Engine
from quatrain.inference.sampling import write
from quatrain.model.gpt import GPT

PROMPTS = [[1], [2, 3, 4], [5] * 9, [1], [27, 6], [7, 8, 9, 10, 11]]


def letters(**switches: object) -> GPT:
    return small(**({"vocab_size": LETTERS.vocab_size, "block_size": 32} | switches))


def written_beside(engine: Engine, jobs: list[tuple[list[int], SamplingConfig, int]], every: int) -> list[Sample]:
    """The samples of jobs of which one more arrives every so many steps."""
    batch, waiting, samples = Batch(engine), list(enumerate(jobs)), {}
    numbers, steps = {}, 0
    while batch.busy or waiting:
        if waiting and steps % every == 0:
            number, (prompt, config, sample) = waiting.pop(0)
            writing = Writing(LETTERS, prompt, config, sample, min(config.max_tokens, 32 - len(prompt)))
            numbers[id(writing)] = number, writing
            batch.add(writing)
        for done in batch.step():
            samples[numbers[id(done)][0]] = done.end()
        steps += 1
    return [samples[number] for number in range(len(jobs))]


@pytest.mark.parametrize(("slots", "every"), [(1, 1), (2, 1), (3, 4), (8, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_samples_written_beside_each_other_are_those_written_alone(slots: int, every: int, dtype: str) -> None:
    """Batched = one by one, and seeds reproduce across batch sizes."""
    model = letters(position="rope", n_kv_head=1)
    settings = [
        SamplingConfig(max_tokens=12, seed=3),
        SamplingConfig(max_tokens=20, temperature=0.0),
        SamplingConfig(max_tokens=5, temperature=0.7, top_k=5, seed=9),
        SamplingConfig(max_tokens=30, top_p=0.8, min_p=0.02),
        SamplingConfig(max_tokens=15, repetition_penalty=1.7, temperature=0.5),
        SamplingConfig(max_tokens=15, stop=("a", "b")),
    ]
    jobs = [(prompt, config, number % 2) for number, (prompt, config) in enumerate(zip(PROMPTS, settings, strict=True))]
    alone = [written_beside(Engine(model, 1, dtype), [job], 1)[0] for job in jobs]
    assert written_beside(Engine(model, slots, dtype), jobs, every) == alone
    assert len({sample.text for sample in alone}) > 3


def test_a_prompt_is_read_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = Engine.prefill
    monkeypatch.setattr(
        Engine, "prefill", lambda self, slots, rows: (read.append(len(rows)), prefill(self, slots, rows))[1]
    )
    write(Engine(letters(), 4), LETTERS, [1, 2, 3], SamplingConfig(n=4, max_tokens=3))
    assert read == [1]


def test_more_samples_than_slots_wait_their_turn() -> None:
    config = SamplingConfig(n=7, max_tokens=9)
    assert write(Engine(letters(), 2), LETTERS, [1, 2], config) == write(Engine(letters(), 7), LETTERS, [1, 2], config)


def test_a_cancelled_sample_leaves_its_slot_to_the_next() -> None:
    batch = Batch(Engine(letters(), 1))
    first, second, third = (Writing(LETTERS, [number], SamplingConfig(temperature=0.0), 0, 20) for number in (1, 2, 3))
    for writing in (first, second, third):
        batch.add(writing)
    batch.step()
    batch.cancel(first)
    batch.cancel(second)  # still waiting
    done = []
    while batch.busy:
        done += batch.step()
    assert done == [third]
    assert (len(first.ids), len(second.ids)) == (1, 0)
    assert third.end() == write(Engine(letters(), 1), LETTERS, [3], SamplingConfig(temperature=0.0, max_tokens=20))[0]


# Past block_size


def test_what_is_visible_is_a_function_of_the_length_alone() -> None:
    row = list(range(100))
    seen = [seen_end(row[:end], 8) for end in range(1, 30)]
    assert all(part[-1] == end for end, part in enumerate(seen))
    assert [len(part) for part in seen] == [1, 2, 3, 4, 5, 6, 7, 8, *[5, 6, 7, 8] * 6][:29]
    assert seen_end([1, 2, 3], 1) == [3]


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("prompt", [[1, 2], [3] * 16, [4, 5] * 15])
def test_sliding_goes_on_with_the_argmax_of_what_is_visible(position: str, prompt: list[int]) -> None:
    model = letters(position=position, block_size=16)
    config = SamplingConfig(temperature=0.0, max_tokens=45, sliding=True)
    (sample,) = write(Engine(model, 1), LETTERS, prompt, config)
    row = list(prompt)
    for token in sample.ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([list(seen_end(row, 16))]))[0, -1].argmax())
        row.append(token)
    assert len(sample.ids) == 45 or sample.finish_reason == "stop"


def test_sliding_changes_nothing_within_block_size() -> None:
    short = write(Engine(letters(), 8), LETTERS, [1], SamplingConfig(max_tokens=99, n=8))
    long = write(Engine(letters(), 8), LETTERS, [1], SamplingConfig(max_tokens=99, n=8, sliding=True))
    assert [one.ids for one in short] == [one.ids[:31] for one in long]
    assert max(len(one.ids) for one in short) == 31 < max(len(one.ids) for one in long)


# Log-probabilities


def test_logprobs_are_those_of_the_uncached_model_whatever_the_temperature() -> None:
    model = letters()
    config = SamplingConfig(max_tokens=10, temperature=0.3, top_k=3, logprobs=4, repetition_penalty=1.5)
    (sample,) = write(Engine(model, 1), LETTERS, [1, 2], config)
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, *sample.ids]]))[0, 1:].double().log_softmax(-1)
    assert [one.id for one in sample.logprobs] == sample.ids
    for place, one in enumerate(sample.logprobs):
        assert one.logprob == pytest.approx(float(expected[place, one.id]), abs=1e-4)
        values, ids = expected[place].topk(4)
        assert [token for token, _ in one.top] == ids.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_logprobs_end_where_the_sample_ends() -> None:
    (whole,) = write(Engine(letters(), 1), LETTERS, [1], SamplingConfig(max_tokens=20, logprobs=0, seed=3))
    stop = whole.text[5:8]
    (cut,) = write(Engine(letters(), 1), LETTERS, [1], SamplingConfig(max_tokens=20, logprobs=0, seed=3, stop=(stop,)))
    assert cut.logprobs == whole.logprobs[: whole.text.index(stop)]
    assert cut.logprobs[0].top == ()
