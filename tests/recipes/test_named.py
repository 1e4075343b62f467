import dataclasses
import math
import shlex

import pytest

from quatrain.model.pretrained import parameter_count
from quatrain.recipes.config import RunConfig
from quatrain.recipes.named import RECIPES
from quatrain.recipes.resolve import flatten
from quatrain.training.schedule import learning_rate

CHARACTERS = {
    "model.n_layer": 4,
    "model.n_head": 4,
    "model.n_embd": 128,
    "model.block_size": 64,
    "model.dropout": 0.0,
    "data.seq_len": 64,
    "optim.lr": 1e-3,
}
GPT2 = {
    "model.n_layer": 12,
    "model.n_head": 12,
    "model.n_embd": 768,
    "model.block_size": 1024,
    "model.position": "learned",
    "model.norm": "layernorm",
    "model.mlp": "gelu_tanh",
    "model.bias": True,
    "model.tied": True,
    "data.seq_len": 1024,
    "data.order": "shuffle",
    "train.tokens_per_step": 524_288,
    "train.steps": 19_073,
    "optim.lr": 6e-4,
    "optim.min_lr": 6e-5,
    "optim.schedule": "cosine",
    "optim.warmup": 715,
    "optim.weight_decay": 0.1,
    "optim.clip": 1.0,
    "optim.betas": (0.9, 0.95),
    "optim.eps": 1e-8,
}
SPEEDRUN = {
    "model.position": "rope",
    "model.norm": "rmsnorm",
    "model.mlp": "relu2",
    "model.bias": False,
    "model.qk_norm": True,
    "model.tied": False,
    "model.zero_init": True,
    "model.logit_softcap": 15.0,
    "model.value_residual": True,
    "model.embedding_shortcut": True,
    "optim.kind": "muon",
    "optim.schedule": "wsd",
}
EXPECTED = {
    "sonnets": CHARACTERS | {"train.tokens_per_step": 16 * 64, "train.micro_batch": 8},
    "shakespeare": CHARACTERS
    | {
        "train.tokens_per_step": 12 * 64,
        "train.steps": 2000,
        "optim.min_lr": 1e-4,
        "optim.schedule": "cosine",
        "optim.warmup": 100,
        "optim.betas": (0.9, 0.99),
    },
    "speedrun-cpu": CHARACTERS | SPEEDRUN | {"optim.lr": 5e-3},
    "gpt2": GPT2,
    "speedrun": {key: GPT2[key] for key in GPT2 if key.startswith(("data.", "train.")) or key == "model.block_size"}
    | {"model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768}
    | SPEEDRUN,
    "gpt2-rope-swiglu": {
        "model.n_layer": 12,
        "model.n_head": 12,
        "model.n_embd": 768,
        "model.position": "rope",
        "model.norm": "rmsnorm",
        "model.mlp": "swiglu",
        "model.tied": True,
        "data.seq_len": 1024,
        "data.order": "shuffle",
        "data.seed": 1337,
        "train.seed": 42,
        "train.tokens_per_step": 524_288,
        "train.micro_batch": 64,
        "train.eval_every": 250,
        "train.eval_tokens": 1_310_720,
        "optim.lr": 1.5e-3,
        "optim.min_lr": 1.5e-4,
        "optim.schedule": "cosine",
        "optim.warmup": 300,
        "optim.weight_decay": 0.1,
        "optim.betas": (0.9, 0.95),
        "optim.clip": 1.0,
    },
    "gpt2-medium": GPT2
    | {"model.n_layer": 24, "model.n_head": 16, "model.n_embd": 1024, "optim.lr": 3e-4, "optim.min_lr": 3e-5},
    "gpt2-large": GPT2
    | {"model.n_layer": 36, "model.n_head": 20, "model.n_embd": 1280, "optim.lr": 2.5e-4, "optim.min_lr": 2.5e-5},
    "gpt2-xl": GPT2
    | {"model.n_layer": 48, "model.n_head": 25, "model.n_embd": 1600, "optim.lr": 2e-4, "optim.min_lr": 2e-5},
}


def test_the_recipes_are_those_of_the_issue():
    assert set(RECIPES) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_has_exactly_the_numbers_of_the_issue(name):
    settings = flatten(RECIPES[name]().config)
    assert {key: settings[key] for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_fits_every_machine_its_store_is_given_later(name):
    config = RECIPES[name]().config
    assert (config.device, config.data.store, config.model.vocab_size) == ("auto", "", 0)
    assert config.train.tokens_per_step % (config.train.micro_batch * config.data.seq_len) == 0


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_says_what_it_is_what_to_expect_and_how_its_data_are_prepared(name):
    recipe = RECIPES[name]()
    assert len(recipe.head.split()) > 5
    words = shlex.split(recipe.prepare)
    assert words[:2] == ["quatrain", "prepare"]
    assert {"--tokenizer", "--out"} <= set(words)
    assert (RECIPES[name].__doc__ or "").splitlines()[0].endswith(".")


def test_the_sonnets_are_two_micro_batches_a_step_and_hold_the_eighth_out():
    recipe = RECIPES["sonnets"]()
    train = recipe.config.train
    assert train.tokens_per_step == 2 * train.micro_batch * recipe.config.data.seq_len
    assert "corpus:sonnets --tokenizer char --val-docs 7" in recipe.prepare


def test_shakespeare_is_prepared_with_its_last_tenth_held_out():
    assert "--tokenizer char --val-tail 0.1" in RECIPES["shakespeare"]().prepare


def test_the_head_of_gpt2_rope_swiglu_states_what_others_reached_on_one_h100():
    head = RECIPES["gpt2-rope-swiglu"]().head
    for fact in ("one H100", "validation loss 2.99", "HellaSwag 31.71 %", "about 7 h", "430,000 tokens/s"):
        assert fact in head


@pytest.mark.parametrize("name", ["speedrun", "speedrun-cpu"])
def test_the_speed_runs_cool_down_to_zero_and_say_what_was_measured_here_and_what_is_of_others(name):
    recipe = RECIPES[name]()
    assert learning_rate(recipe.config.train.steps, recipe.config.optim, recipe.config.train.steps) == 0
    assert "easured here" in recipe.head
    assert "others' findings" in recipe.head


def test_speedrun_cpu_has_the_size_of_shakespeare_within_a_twentieth():
    plain, fast = (
        dataclasses.replace(RECIPES[name]().config.model, vocab_size=66) for name in ("shakespeare", "speedrun-cpu")
    )
    assert math.isclose(parameter_count(plain), parameter_count(fast), rel_tol=0.05)


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if "optim.min_lr" in expected])
def test_cosine_ends_at_a_tenth(name):
    optim = RECIPES[name]().config.optim
    assert math.isclose(optim.min_lr, optim.lr / 10)


def test_ten_billion_tokens_are_19_073_steps():
    train = RECIPES["gpt2"]().config.train
    assert train.steps == 10_000_000_000 // train.tokens_per_step


def test_the_defaults_of_a_recipe_are_gpt2s_shape():
    assert RunConfig().model == RECIPES["gpt2"]().config.model
