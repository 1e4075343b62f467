"""From a prompt to text: where a sample ends, what is streamed, and what stays as it was."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quatrain.errors import ConfigError, DataError
from quatrain.inference.config import SamplingConfig
from quatrain.inference.forward import Forward
from quatrain.inference.sampling import Sample, generate, prompt_ids, write
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, gpt2

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyz ")
BYTES = ByteTokenizer()


def network(tokenizer: Tokenizer = LETTERS, block_size: int = 32) -> GPT:
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=block_size, vocab_size=tokenizer.vocab_size)
    return GPT(config, torch.Generator().manual_seed(1)).eval()


class Scripted:
    """Stands for an engine that writes given ids behind any prompt of one id, and eot after them."""

    def __init__(self, ids: list[int], tokenizer: Tokenizer, block_size: int = 64) -> None:
        self.config = ModelConfig(block_size=block_size, vocab_size=tokenizer.vocab_size)
        self.slots = 1
        self.lengths = [0]
        self.next = torch.tensor([*ids, *[tokenizer.eot] * block_size])
        self.calls: list[int] = []

    def prefill(self, slots: list[int], rows: list[list[int]]) -> Tensor:
        self.lengths[0] += len(rows[0])
        self.calls.append(self.lengths[0])
        return nn.functional.one_hot(self.next[self.lengths[0] - 1], self.config.vocab_size).float().unsqueeze(0)

    def decode(self, slots: list[int], ids: list[int]) -> Tensor:
        return self.prefill(slots, [ids])

    def free(self, slot: int) -> None:
        self.lengths[0] = 0


def written(
    text: str, tokenizer: Tokenizer = LETTERS, block_size: int = 64, **settings: object
) -> tuple[Sample, list[str]]:
    """The sample of a network that writes this text and then eot, and the pieces that were streamed."""
    pieces: list[str] = []
    engine = Scripted(tokenizer.encode(text).tolist(), tokenizer, block_size)
    config = SamplingConfig(temperature=0.0, **settings)
    (sample,) = write(engine, tokenizer, [tokenizer.eot], config, lambda number, piece: pieces.append(piece))
    return sample, pieces


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
    monkeypatch.setattr(Forward, "logits", lambda self, x: self._head(x).float())  # the fault: all rows
    with pytest.raises(IndexError):
        generate(model, LETTERS, "a", config)


@pytest.mark.parametrize("prompt_length", [1, 5, 15, 16])
def test_prompt_and_sample_never_pass_block_size(prompt_length: int) -> None:
    never_ends = Scripted([0] * 99, LETTERS, block_size=16)
    (sample,) = write(never_ends, LETTERS, [0] * prompt_length, SamplingConfig(temperature=0.0, max_tokens=99))
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
    assert prompt_ids(BYTES, "<|endoftext|>", 64, SamplingConfig()) == list(b"<|endoftext|>")


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
    engine = Scripted(LETTERS.encode("abcdef").tolist(), LETTERS)
    write(engine, LETTERS, [LETTERS.eot], SamplingConfig(temperature=0.0, stop=("bc",)))
    assert engine.calls == [1, 2, 3]


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


def test_a_compiled_model_writes_what_the_plain_one_does_case_49() -> None:
    def never(graph: object, inputs: object) -> None:
        raise AssertionError("compiled code was asked for")

    config = SamplingConfig(n=2, max_tokens=8)
    assert generate(torch.compile(network(), backend=never), LETTERS, "ab", config) == generate(
        network(), LETTERS, "ab", config
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto", "int8"])
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
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("logprobs", -1),
    ],
)
def test_settings_that_cannot_be_sampled_with_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        SamplingConfig(**{setting: value})
