"""From logits to ids to text: the draw against numpy, and where a sample ends."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quatrain.errors import ConfigError, DataError
from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import Sample, StopTexts, choose, generate, nucleus
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, gpt2
from quatrain.tokens.order import derive

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyz ")
BYTES = ByteTokenizer()


def network(tokenizer: Tokenizer = LETTERS, block_size: int = 32) -> GPT:
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=block_size, vocab_size=tokenizer.vocab_size)
    return GPT(config, torch.Generator().manual_seed(1)).eval()


class Scripted(nn.Module):
    """Stands for a GPT that writes given ids behind any prompt of one id, and eot after them."""

    def __init__(self, ids: list[int], tokenizer: Tokenizer, block_size: int = 64) -> None:
        super().__init__()
        self.config = ModelConfig(block_size=block_size, vocab_size=tokenizer.vocab_size)
        self.device = torch.device("cpu")
        self.next = torch.tensor([*ids, *[tokenizer.eot] * block_size])

    def hidden(self, ids: Tensor) -> Tensor:
        return self.next[: ids.shape[1]].view(1, -1, 1)

    def head(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x.squeeze(-1), self.config.vocab_size).float()


def written(
    text: str, tokenizer: Tokenizer = LETTERS, block_size: int = 64, **settings: object
) -> tuple[Sample, list[str]]:
    """The sample of a network that writes this text and then eot, and the pieces that were streamed."""
    pieces: list[str] = []
    model = Scripted(tokenizer.encode(text).tolist(), tokenizer, block_size)
    config = SamplingConfig(temperature=0.0, **settings)
    (sample,) = generate(model, tokenizer, "", config, on_text=lambda number, piece: pieces.append(piece))
    return sample, pieces


# choose


def chosen_by_numpy(
    logits: np.ndarray, draw: float, temperature: float, top_k: int | None, top_p: float
) -> tuple[int, float]:
    """The id, and how near the draw came to another one: the same rule written as a loop."""
    if temperature == 0 or top_p == 0:
        return int(np.argmax(logits)), 1.0
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    kept: list[int] = []
    held, nearest = 0.0, 1.0
    likeliest = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))[:top_k]
    enough = top_p * sum(probabilities[token] for token in likeliest)  # a share of what top_k leaves
    for token in likeliest:
        nearest = min(nearest, abs(held - enough)) if kept else nearest
        if kept and held >= enough:
            break
        kept.append(token)
        held += probabilities[token]
    passed = 0.0
    for token in kept:
        passed += probabilities[token] / held
        nearest = min(nearest, abs(passed - draw))
        if passed > draw:
            return token, nearest
    return kept[-1], nearest


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.0, 1e-300, 1e-3, 0.7, 1.0, 5.0, 1e300]),
    st.sampled_from([None, 1, 2, 3, 1000]),
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
)
def test_the_chosen_id_is_that_of_numpy(
    logits: list[float], draw: float, temperature: float, top_k: int | None, top_p: float
) -> None:
    expected, nearest = chosen_by_numpy(np.array(logits, dtype=np.float32), draw, temperature, top_k, top_p)
    found = choose(torch.tensor([logits]), torch.tensor([draw], dtype=torch.float64), temperature, top_k, top_p)
    assert (found.shape, found.dtype) == ((1,), torch.int64)
    assert int(found) == expected or nearest < 1e-9  # a draw on a border may fall to either side


def test_rows_are_chosen_independently() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, draws = torch.randn(50, 20, generator=generator), torch.rand(50, generator=generator)
    together = choose(logits, draws, 0.8, 10, 0.9)
    assert together.tolist() == [int(choose(logits[i : i + 1], draws[i : i + 1], 0.8, 10, 0.9)) for i in range(50)]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 0.0), (1e-300, 1.0), (5e-324, 1.0)])
def test_greedy_takes_the_likeliest_and_of_equals_the_smallest_id(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[0.0, 3.0, -1.0, 3.0], [9.0, 8.0, 7.0, 6.0]])
    assert choose(logits, torch.tensor([0.0, 0.999]), temperature, None, top_p).tolist() == [1, 0]


def test_a_huge_temperature_makes_all_ids_alike() -> None:
    draws = torch.arange(4) / 4 + 0.01
    logits = torch.tensor([[80.0, -80.0, 3.0, 0.0]]).expand(4, 4)
    assert sorted(choose(logits, draws, 1e300, None, 1.0).tolist()) == [0, 1, 2, 3]


def frequencies(
    top_k: int | None = None, top_p: float = 1.0, temperature: float = 1.0, draws: Tensor | None = None
) -> Tensor:
    """Shares of the ids of probability 0.5, 0.1, 0.25, 0.15 among many draws (an even grid of them by default)."""
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 if draws is None else draws
    tokens = choose(logits.expand(len(grid), 4), grid, temperature, top_k, top_p)
    return torch.bincount(tokens, minlength=4) / len(grid)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.1, 0.25, 0.15]),
        ({"top_k": 4}, [0.5, 0.1, 0.25, 0.15]),
        ({"top_k": 10**6}, [0.5, 0.1, 0.25, 0.15]),
        ({"top_k": 2}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.8}, [0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 0.8, "top_k": 2}, [2 / 3, 0, 1 / 3, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345]),
    ],
)
def test_frequencies_are_the_probabilities(settings: dict[str, float], expected: list[float]) -> None:
    assert frequencies(**settings).tolist() == pytest.approx(expected, abs=2e-4)


def test_the_draws_of_a_seed_are_uniform() -> None:
    draws = torch.tensor([derive(7, number, 5) / 2**64 for number in range(20_000)])
    expected = torch.tensor([0.5, 0.1, 0.25, 0.15])
    spread = (expected * (1 - expected) / 20_000).sqrt()
    assert ((frequencies(draws=draws) - expected).abs() < 4 * spread).all()


def test_the_nucleus_is_the_shortest_prefix_that_holds_the_probability() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    sizes = {top_p: int(nucleus(probabilities, None, top_p).sum()) for top_p in (0.0, 0.5, 0.50001, 0.75, 0.8, 1.0)}
    assert sizes == {0.0: 1, 0.5: 1, 0.50001: 2, 0.75: 2, 0.8: 3, 1.0: 4}


# generate


def test_greedy_is_the_argmax_of_the_logits_behind_each_prefix() -> None:
    model = network()
    (sample,) = generate(model, LETTERS, "shall i", SamplingConfig(temperature=0.0, max_tokens=12))
    ids = LETTERS.encode("shall i").tolist()
    for token in sample.ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    assert len(sample.ids) == 12 or sample.finish_reason == "stop"
    assert sample.text == LETTERS.decode(sample.ids)


def test_sample_i_is_the_same_whatever_n_is_and_differs_from_the_others() -> None:
    drawn = {n: generate(network(), LETTERS, "a", SamplingConfig(n=n, max_tokens=16)) for n in (1, 2, 5)}
    assert drawn[5][:2] == drawn[2]
    assert drawn[2][:1] == drawn[1]
    assert len({sample.text for sample in drawn[5]}) == 5
    other_seed = generate(network(), LETTERS, "a", SamplingConfig(n=5, max_tokens=16, seed=43))
    assert not {sample.text for sample in other_seed} & {sample.text for sample in drawn[5]}


def test_a_shorter_sample_is_the_beginning_of_a_longer_one() -> None:
    (long,) = generate(network(), LETTERS, "a", SamplingConfig(max_tokens=20, seed=1))
    (short,) = generate(network(), LETTERS, "a", SamplingConfig(max_tokens=6, seed=1))
    assert (short.ids, short.finish_reason) == (long.ids[:6], "length")


def test_an_empty_prompt_is_one_eot() -> None:
    model = network()
    (sample,) = generate(model, LETTERS, "", SamplingConfig(temperature=0.0, max_tokens=1))
    with torch.no_grad():
        token = int(model(torch.tensor([[LETTERS.eot]]))[0, -1].argmax())
    assert sample.ids == ([token] if token != LETTERS.eot else [])


def test_ids_of_the_vocabularys_padding_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()  # 28 ids, 64 rows
    config = SamplingConfig(n=20, max_tokens=20, temperature=1e6)
    drawn = [token for sample in generate(model, LETTERS, "a", config) for token in sample.ids]
    assert len(drawn) > 100
    assert set(drawn) <= set(range(LETTERS.eot))
    monkeypatch.setattr(GPT, "head", lambda self, x: nn.functional.linear(x, self.head_weight))  # the fault: all rows
    with pytest.raises(IndexError):
        generate(model, LETTERS, "a", config)


@pytest.mark.parametrize("prompt_length", [1, 5, 15, 16])
def test_prompt_and_sample_never_pass_block_size(prompt_length: int) -> None:
    never_ends = Scripted([0] * 99, LETTERS, block_size=16)
    (sample,) = generate(never_ends, LETTERS, "a" * prompt_length, SamplingConfig(temperature=0.0, max_tokens=99))
    assert (len(sample.ids), sample.finish_reason) == (16 - prompt_length, "length")
    real = generate(network(block_size=16), LETTERS, "a" * prompt_length, SamplingConfig(n=8, max_tokens=99))
    assert all(
        len(one.ids) == 16 - prompt_length if one.finish_reason == "length" else len(one.ids) < 16 - prompt_length
        for one in real
    )


def test_a_prompt_of_block_size_gives_an_empty_sample_and_a_longer_one_an_error_with_both_numbers() -> None:
    assert generate(network(), LETTERS, "a" * 32) == [Sample("", [], "length")]
    with pytest.raises(DataError, match=r"33 ids.* 32"):
        generate(network(), LETTERS, "a" * 33)


def test_max_tokens_0_gives_an_empty_sample() -> None:
    assert generate(network(), LETTERS, "a", SamplingConfig(max_tokens=0, n=2)) == [Sample("", [], "length")] * 2


def test_eot_ends_a_sample_and_is_not_part_of_it() -> None:
    sample, _ = written("hello")
    assert sample == Sample("hello", LETTERS.encode("hello").tolist(), "stop")
    assert written("")[0] == Sample("", [], "stop")
    assert written("hello", max_tokens=5)[0].finish_reason == "length"
    assert written("hello", max_tokens=6)[0].finish_reason == "stop"


def test_the_marker_of_eot_in_a_prompt_is_ordinary_text() -> None:
    seen: list[int] = []
    model = network(BYTES)
    hidden = model.hidden
    model.hidden = lambda ids: (seen.extend(ids[0].tolist()), hidden(ids))[1]
    generate(model, BYTES, "<|endoftext|>", SamplingConfig(max_tokens=1))
    assert seen == list(b"<|endoftext|>")


# Text that is streamed


@pytest.mark.parametrize("text", ["plain", "aé€😀z", "😀😀", "日本語"])
def test_pieces_join_to_the_text_and_never_hold_half_a_character(text: str) -> None:
    sample, pieces = written(text, BYTES)
    assert sample == Sample(text, list(text.encode()), "stop")
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)
    assert "\ufffd" not in "".join(pieces)
    whole = [piece for piece in pieces if piece]
    assert whole == list(text)  # each character as soon as its last byte is there


def test_a_character_cut_off_by_max_tokens_shows_as_a_replacement_at_the_very_end() -> None:
    sample, pieces = written("a€", BYTES, max_tokens=3)
    assert sample == Sample("a\ufffd", list("a€".encode()[:3]), "length")
    assert [piece for piece in pieces if piece] == ["a", "\ufffd"]


def test_pieces_of_several_samples_carry_their_number() -> None:
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}

    def collect(number: int, piece: str) -> None:
        pieces[number] += piece

    drawn = generate(network(), LETTERS, "a", SamplingConfig(n=3, max_tokens=16), on_text=collect)
    assert list(pieces.values()) == [sample.text for sample in drawn]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("o wo",), "hell"),  # over a border of tokens
        (("h",), ""),  # at once
        (("orld", "o"), "hell"),  # the first that appears
        (("xyz", "ld"), "hello wor"),
        (("worlds",), "hello world"),  # only begun: passed on at the end
        (("hello world",), ""),
    ],
)
def test_a_stop_text_ends_the_sample_before_it(stop: tuple[str, ...], text: str) -> None:
    sample, pieces = written("hello world", stop=stop)
    assert sample == Sample(text, LETTERS.encode(text).tolist(), "stop")
    assert "".join(pieces) == text


def test_a_stop_text_that_begins_again_inside_itself_is_found() -> None:
    assert written("aaab", stop=("aab",))[0].text == "a"
    assert written("ababac", stop=("abac",))[0].text == "ab"


def test_a_stop_text_within_one_token_cuts_the_whole_token() -> None:
    tokenizer = gpt2()
    sample, pieces = written("Once upon a time", tokenizer, stop=("on",))
    assert tokenizer.encode("Once upon").tolist()[:-1] == sample.ids == tokenizer.encode("Once").tolist()
    assert (sample.text, sample.finish_reason) == ("Once up", "stop")
    assert "".join(pieces) == "Once up"


def test_nothing_is_computed_behind_a_stop_text() -> None:
    model = Scripted(LETTERS.encode("abcdef").tolist(), LETTERS)
    calls: list[int] = []
    hidden = model.hidden
    model.hidden = lambda ids: (calls.append(ids.shape[1]), hidden(ids))[1]
    generate(model, LETTERS, "", SamplingConfig(temperature=0.0, stop=("bc",)))
    assert calls == [1, 2, 3]


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_whatever_the_pieces_text_passes_up_to_the_first_stop_text(pieces: list[str], stop: str) -> None:
    stops = StopTexts([stop])
    passed = []
    for piece in pieces:
        passed.append(stops.push(piece))
        held = len("".join(pieces[: len(passed)])) - len("".join(passed))
        assert stops.found or held < len(stop)  # no more is held back than may begin the stop text
    passed.append(stops.end())
    whole = "".join(pieces)
    assert "".join(passed) == stops.text == whole.split(stop)[0]
    assert stops.found == (stop in whole)


# What sampling must leave alone


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_and_the_generators_are_left_as_they_were(training: bool) -> None:
    config = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=32, vocab_size=LETTERS.vocab_size, dropout=0.5)
    model = GPT(config).train(training)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = generate(model, LETTERS, "a", SamplingConfig(n=2, max_tokens=8))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert {module.training for module in model.modules()} == {training}
    assert generate(model, LETTERS, "a", SamplingConfig(n=2, max_tokens=8)) == first  # and dropout was off

    def broken(number: int, piece: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generate(model, LETTERS, "a", on_text=broken)
    assert {module.training for module in model.modules()} == {training}
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_draw_does_not_depend_on_how_often_it_is_made(precision: str) -> None:
    config = SamplingConfig(n=2, max_tokens=8)
    assert len({str(generate(network(), LETTERS, "ab", config, precision)) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", float("nan")),
        ("max_tokens", -1),
        ("n", 0),
        ("stop", ("a", "")),
    ],
)
def test_settings_that_cannot_be_sampled_with_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        SamplingConfig(**{setting: value})
