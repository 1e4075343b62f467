"""Probes told by models of which the answer is known: oracles, a circuit made by hand, one that was trained, noise."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from quatrain.errors import UsageError
from quatrain.inference.forward import Forward
from quatrain.inference.probe_kinds import FRAMES, LENGTHS, SHOTS
from quatrain.inference.probe_rows import Probe
from quatrain.inference.probe_words import MOST_IDS, Draws, words_of
from quatrain.inference.probes import Prepared, ask, evaluate_probes, prepare_probes
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, gpt2, load_tokenizer
from switches import FASTER

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = CharTokenizer(LETTERS + " ,.:\n")
V, T = TOKENIZER.vocab_size, 64


class Oracle:
    """What the probes ask of a model, its logits given by a rule."""

    def __init__(self, block_size: int = T) -> None:
        self.config = SimpleNamespace(vocab_size=V, block_size=block_size)
        self.device = torch.device("cpu")
        self.dtype = "fp32"

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.stack([self.rule(row[: place + 1]) for row in ids.tolist() for place in range(len(row))])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def rule(self, prompt: list[int]) -> Tensor:
        raise NotImplementedError


class Copier(Oracle):
    """What followed the longest copy of the prompt's end, the latest of equals."""

    def rule(self, prompt: list[int]) -> Tensor:
        def copied(end: int) -> int:
            return next((n for n in range(end + 1) if prompt[end - n] != prompt[-1 - n]), end + 1)

        best = max(range(len(prompt) - 1), key=lambda end: (copied(end), end), default=-1)
        return 20.0 * F.one_hot(torch.tensor(prompt[best + 1]), V).float()


class Echoer(Oracle):
    """Whatever stood three ids ago: of "a: " and "a: a\\na: " the word to say again."""

    def rule(self, prompt: list[int]) -> Tensor:
        return 20.0 * F.one_hot(torch.tensor(prompt[-3:][0]), V).float()


class Noise(Oracle):
    """Random logits over the letters."""

    def hidden(self, ids: Tensor) -> Tensor:
        logits = torch.randn(*ids.shape, V, generator=torch.Generator().manual_seed(int(ids.sum())))
        logits[..., [token for token in range(V) if token not in TOKENIZER.encode(LETTERS)]] = -30
        return logits.flatten(0, 1)


def scores_of(model: Any, rows: int = 10, tokenizer: Tokenizer = TOKENIZER, context: int = T) -> dict[str, Any]:
    forward = Forward(model) if isinstance(model, GPT) else model
    return evaluate_probes(forward, prepare_probes(tokenizer, model.config.vocab_size, context, rows))


def each(result: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    return [
        (family, setting, name, score)
        for family, settings in result["scores"].items()
        for setting, scores in settings.items()
        for name, score in scores.items()
    ]


def test_who_copies_the_longest_end_does_all_that_repeats_and_is_as_good_as_the_baseline() -> None:
    result = scores_of(Copier())
    assert set(result["scores"]["induction"]) == {f"gap {2**n}" for n in range(1, 6)}
    for family, setting, name, score in each(result):
        shots = int(setting.split()[0]) if "shot" in setting else 0
        follows = {"pattern": shots >= 2, "lookup": shots >= 4, "induction": True, "copying": "same" in setting}
        if follows.get(family) and "loss" not in name:
            assert (score["value"], score["baseline"]) == (1.0, 1.0), (family, setting, name)
        if family == "echo" and shots:
            assert (score["value"], score["baseline"]) == (0.0, 0.0), (family, setting, name)
        if name == "loss":
            assert score["value"] < 0.01 < score["baseline"] < score["chance"]
        if name == "first_loss":
            assert score["value"] > score["chance"]


def test_a_rule_that_the_examples_only_show_is_told_from_counting() -> None:
    for setting, scores in scores_of(Echoer())["scores"]["echo"].items():
        assert (scores["choice"]["value"], scores["greedy"]["value"]) == (1.0, 1.0), setting
        assert setting == "0 shots" or scores["choice"]["baseline"] == 0.0


def test_noise_is_at_chance_within_four_standard_errors() -> None:
    result = scores_of(Noise(), rows=100)
    told = [one for one in each(result) if one[2] in ("right", "choice", "greedy")]
    assert len(told) == 5 + 2 * 3 + 2 * (6 + 5 + 5)
    for family, setting, name, score in told:
        error = math.sqrt(score["chance"] * (1 - score["chance"]) / score["count"])
        assert abs(score["value"] - score["chance"]) <= 4 * error, (family, setting, name)


def induction_circuit() -> GPT:
    """Two heads and nothing else: each id looks for the place behind its last copy (Elhage et al. 2021)."""
    C = 3 * V + T
    token, before, out = (slice(n * V, (n + 1) * V) for n in range(3))
    place = slice(3 * V, C)
    model = GPT(
        ModelConfig(n_layer=2, n_head=1, n_embd=C, block_size=T, vocab_size=V, norm="rmsnorm", bias=False, tied=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.transformer["wte"].weight[:V, token] = torch.eye(V)
        model.transformer["wpe"].weight[:, place] = torch.eye(T)
        first, second = (block.attn for block in model.transformer["h"])
        q, k, v = first.c_attn.weight.split(C)
        q[place, place] = 10 * torch.diag(torch.ones(T - 1), 1)  # looks one place back
        k[place, place] = torch.eye(T)
        v[token, token] = torch.eye(V)
        first.c_proj.weight[before, token] = torch.eye(V)
        q, k, v = second.c_attn.weight.split(C)
        q[token, token] = 10 * torch.eye(V)
        k[token, before] = torch.eye(V)
        v[token, token] = torch.eye(V)
        second.c_proj.weight[out, token] = torch.eye(V)
        model.lm_head.weight[:V, out] = 10 * torch.eye(V)
    return model.eval()


def test_an_induction_circuit_made_by_hand_gets_everything() -> None:
    scores = scores_of(induction_circuit(), rows=20)["scores"]
    assert {setting: one["right"]["value"] for setting, one in scores["induction"].items()} == dict.fromkeys(
        scores["induction"], 1.0
    )
    for setting, one in scores["pattern"].items():
        assert one["choice"]["value"] == 1.0 or setting in ("0 shots", "1 shot")


def trained(n_layer: int) -> dict[str, float]:
    """Shares right at each gap after 120 steps on what repeats."""
    shape = {"n_head": 1, "n_embd": 32, "block_size": 16, "vocab_size": V, "bias": False, "norm": "rmsnorm"}
    switches = {"tied": False, "value_residual": True, "embedding_shortcut": True}
    model = GPT(ModelConfig(n_layer=n_layer, **shape, **switches), torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(120):
        segments = torch.stack([torch.randperm(len(LETTERS), generator=draw) for _ in range(64)]) + 5
        gaps = torch.randint(2, 9, (64, 1), generator=draw)
        ids = segments.gather(1, torch.arange(17) % gaps)
        again = torch.arange(16) >= gaps
        F.cross_entropy(model(ids[:, :-1])[again], ids[:, 1:][again]).backward()
        optimizer.step()
        optimizer.zero_grad()
    scores = scores_of(model, 40, context=16)["scores"]["induction"]
    return {setting: one["right"]["value"] for setting, one in scores.items()}


def test_the_probe_sees_what_training_on_repetition_gives_to_two_layers_and_not_to_one() -> None:
    one, two = trained(1), trained(2)
    assert max(one.values()) < 0.6 < 0.9 < min(two.values()), (one, two)


@pytest.mark.parametrize("switches", [{}, FASTER], ids=["plain", "faster"])
def test_what_a_row_is_told_in_a_batch_it_is_told_alone(switches: dict[str, Any]) -> None:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": T, "vocab_size": V, "dropout": 0.1}
    model = GPT(ModelConfig(**shape, **switches), torch.Generator().manual_seed(3)).train()
    rows = [row for probe in prepare_probes(TOKENIZER, V, T, 3).probes for row in probe.rows]
    heard: list[int] = []
    found = ask(Forward(model), rows, heard.append)
    assert sum(heard) == sum(len(row.ids) for row in rows)
    model.eval()
    for row, said in zip(rows, found, strict=True):
        logits = model(torch.tensor([row.ids]))[0].detach()
        for (place, wanted), loss, greedy in zip(row.asked, said.losses, said.greedy, strict=True):
            assert loss == pytest.approx(float(-logits[place].log_softmax(-1)[wanted]), abs=1e-5)
            assert greedy == (int(logits[place].argmax()) == wanted)


def text_of(ids: Sequence[int], tokenizer: Tokenizer = TOKENIZER) -> str:
    return tokenizer.decode(ids[1:])


def rows_by(prepared: Prepared) -> dict[tuple[str, str], Probe]:
    return {(probe.family, probe.setting): probe for probe in prepared.probes}


@settings(max_examples=25)
@given(
    st.sets(st.sampled_from(LETTERS + " ,.:\n0123456789é春"), max_size=40),
    st.integers(1, 200),
    st.integers(0, 2**63),
    st.integers(1, 3),
)
def test_rows_fit_and_hold_what_is_asked_for_with_any_tokenizer(
    characters: set[str], context: int, seed: int, count: int
) -> None:
    tokenizer = CharTokenizer(characters)
    prepared = prepare_probes(tokenizer, tokenizer.vocab_size, context, count, seed)
    gaps = [f"gap {2**n}" for n in range(1, max(2, context.bit_length() - 1))]
    made = rows_by(prepared)
    left_out = {(family, setting) for family, reasons in prepared.left_out.items() for setting in reasons}
    few = [f"{shots} shot{'s' * (shots != 1)}" for shots in SHOTS]
    wanted = {("induction", gap) for gap in gaps} | {
        (name, shots) for name in ("pattern", "lookup", "echo") for shots in few
    }
    wanted |= {("copying", f"{length} letters, {kind}") for length in LENGTHS for kind in FRAMES}
    assert made.keys() | left_out == wanted
    assert not made.keys() & left_out
    for (family, setting), probe in made.items():
        assert len(probe.rows) == count
        for row in probe.rows:
            assert row.ids[0] == tokenizer.eot
            assert tokenizer.eot not in row.ids[1:]
            assert len(row.ids) <= context
            assert all(0 <= token < tokenizer.eot for token in (*row.ids[1:], *(wanted for _, wanted in row.asked)))
            if family == "induction":
                check_induction(row.ids, row.asked, int(setting.split()[1]))
            if family == "copying":
                rare = tokenizer.decode([token for _, token in row.asked])
                assert len(rare) == int(setting.split()[0])
                assert text_of([*row.ids, row.asked[-1][1]], tokenizer).count(" " + rare) == 2


def check_induction(ids: Sequence[int], asked: Sequence[tuple[int, int]], gap: int) -> None:
    size = len(asked) // 2
    assert len(ids) == 1 + gap + size
    for (place, wanted), (before, same) in zip(asked[size:], asked[:size], strict=True):
        assert (place - before, wanted) == (gap, same)
        assert ids[place] == ids[before]
        assert ids[before + 1] == same
        assert ids[: place + 1].count(ids[place]) == 2  # nothing else can be meant


def test_the_answers_of_examples_are_right_and_choices_are_different() -> None:
    for (family, setting), probe in rows_by(prepare_probes(TOKENIZER, V, 200, 20)).items():
        for row in probe.rows if "shot" in setting else []:
            text, choices = text_of(row.ids), [TOKENIZER.decode([token]) for _, token in row.asked]
            answer, shots = choices[0], int(setting.split()[0])
            assert len(set(choices)) == len(choices) == (3 if family == "pattern" else 4)
            assert {place for place, _ in row.asked} == {len(row.ids) - 1}
            if family == "pattern":
                assert text == (answer + text[1:3]) * shots
                continue
            *lines, query = text.split("\n")
            pairs = [line.split(": ") for line in lines]
            assert len(pairs) == shots
            if family == "echo":
                assert query == f"{answer}: "
                assert all(key == value for key, value in pairs)
                assert len({answer, *(key for key, _ in pairs)}) == shots + 1
            else:
                assert dict(pairs).get(query[0], answer) == answer
                assert {value for _, value in pairs} <= set(choices)
                assert len({key for key, _ in pairs}) == min(4, shots)


def test_rows_depend_on_the_seed_alone_and_fewer_are_the_first_ones() -> None:
    few, many = (rows_by(prepare_probes(TOKENIZER, V, context, count)) for context, count in ((40, 3), (T, 9)))
    assert len(few) < len(many)
    for key, probe in few.items():
        assert probe.rows == many[key].rows[:3]
    again, other = (rows_by(prepare_probes(TOKENIZER, V, 40, 3, seed)) for seed in (1337, 1338))
    for key, probe in few.items():
        assert probe.data_hash == again[key].data_hash
        assert probe.data_hash != other[key].data_hash or key == ("pattern", "0 shots")
    model = induction_circuit()
    assert scores_of(model, 3) == scores_of(model, 3)


def test_every_score_says_what_it_depends_on() -> None:
    result = scores_of(Noise(), rows=25)
    assert (result["rows"], result["context_length"], result["seed"], result["precision"]) == (25, T, 1337, "fp32")
    hashes = [score["data_hash"] for *_, score in each(result)]
    assert all(len(one) == 64 for one in [*hashes, result["data_hash"]])
    for family, setting, name, score in each(result):
        assert score["method"]
        assert score["rows"] == 25
        assert score["count"] == 25 * (1 if name in ("exact", "choice", "greedy") else ids_asked(setting))
        assert 1 <= score["context_length"] <= T
        if name in ("choice", "greedy", "exact"):  # one outcome a row, 0 or 1
            variance = score["value"] * (1 - score["value"]) / 24
            assert score["standard_error"] == pytest.approx(math.sqrt(variance), abs=1e-9), (family, setting)
    alone = scores_of(Noise(), rows=1)
    assert {score["standard_error"] for *_, score in each(alone)} == {None}


def ids_asked(setting: str) -> int:
    first, second, *_ = setting.split()
    return min(8, int(second)) - 1 if first == "gap" else int(first)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "spaced"), [(gpt2(), MOST_IDS, True), (ByteTokenizer(), 52, False), (TOKENIZER, 26, False)]
)
def test_ordinary_ids_are_letters_that_text_gives(tokenizer: Tokenizer, ids: int, spaced: bool) -> None:
    words = words_of(tokenizer, tokenizer.vocab_size)
    assert len(words.ids) == ids
    for token in words.ids[:: max(1, ids // 100)]:
        text = tokenizer.decode([token])
        assert text.strip().isalpha()
        assert tokenizer.encode(text).tolist() == [token]
    assert all(tokenizer.decode([token]).startswith(" ") == spaced for token in words.words)
    assert words.letters == LETTERS
    assert tokenizer.decode(words.arrow) == (" ->" if spaced else ": " if tokenizer is TOKENIZER else " -> ")
    assert max(words_of(tokenizer, 20).ids, default=0) < 20  # never an id that the model lacks


def test_any_tokenizer_json_gives_probes(tmp_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="no optional library: tokenizers")
    text = [f"{before} {between}" for pairs in FRAMES.values() for before, between in pairs] * 5 + [*LETTERS]
    special = ["<|endoftext|>", "[UNK]"]
    unigram = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    unigram.decoder = tokenizers.decoders.Metaspace()
    unigram.train_from_iterator(text, tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=special))
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.train_from_iterator(text, tokenizers.trainers.WordLevelTrainer(special_tokens=special))
    for name, one in {"pieces": unigram, "words": whole}.items():
        path = tmp_path / f"{name}.json"
        one.save(str(path))
        tokenizer = load_tokenizer(path)
        prepared = prepare_probes(tokenizer, tokenizer.vocab_size, 128, 2)
        unknown = one.token_to_id("[UNK]")
        assert {"induction", "pattern"} <= {probe.family for probe in prepared.probes}
        assert ("copying" in prepared.left_out) == (name == "words")  # it spells no string of letters
        for probe in prepared.probes:
            assert all(unknown not in row.ids for row in probe.rows)


def test_a_model_that_says_nothing_is_never_right() -> None:
    class Silent(Oracle):
        def rule(self, prompt: list[int]) -> Tensor:
            return torch.full((V,), torch.nan)

    assert {score["value"] for *_, name, score in each(scores_of(Silent(), 2)) if name == "choice"} == {0.0}


def test_draws_are_fixed_and_fair() -> None:
    draws = Draws(1337, 7)
    assert [draws.below(100) for _ in range(6)] == [47, 75, 29, 40, 87, 77]
    counts = np.bincount([token for _ in range(2000) for token in draws.different(range(6), 3)])
    assert abs(counts - 1000).max() < 4 * math.sqrt(500)


def test_a_wrong_number_of_rows_is_told() -> None:
    with pytest.raises(UsageError, match="rows is 0, it must be at least 1"):
        prepare_probes(TOKENIZER, V, T, 0)
