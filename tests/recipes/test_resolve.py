import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import ConfigError, UsageError
from quatrain.model.config import ModelConfig
from quatrain.recipes.config import SECTIONS, RunConfig
from quatrain.recipes.named import RECIPES
from quatrain.recipes.resolve import PEERS_NAMES, differences, flatten, options, resolve, to_toml
from quatrain.tokens.config import DataConfig
from quatrain.training.config import OptimConfig, TrainConfig

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
HEADS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)  # ours: no control characters
RATES = st.floats(0, 1e6)
COUNTS = st.integers(0, 10**9)
SIZES = st.integers(1, 40)


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    """Any configuration that is right: every setting drawn, and what must fit together made to."""
    kv_heads, group, half_dim, seq_len, micro_batch = (draw(SIZES) for _ in range(5))
    warmup, cooldown = draw(COUNTS), draw(COUNTS)
    lr = draw(RATES)
    n_head = kv_heads * group
    model = ModelConfig(
        n_layer=draw(SIZES),
        n_head=n_head,
        n_kv_head=draw(st.sampled_from([0, kv_heads])),
        n_embd=n_head * 2 * half_dim,
        block_size=seq_len + draw(COUNTS),
        vocab_size=draw(COUNTS),
        vocab_multiple=draw(SIZES),
        position=draw(st.sampled_from(["learned", "rope"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        mlp=draw(st.sampled_from(["gelu_tanh", "swiglu", "relu2"])),
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        dropout=draw(st.floats(0, 1, exclude_max=True)),
        rope_theta=draw(st.floats(1e-9, 1e9)),
    )
    optim = OptimConfig(
        lr=lr,
        min_lr=lr * draw(st.floats(0, 1)),
        schedule=draw(st.sampled_from(["constant", "cosine", "wsd"])),
        warmup=warmup,
        cooldown=cooldown,
        weight_decay=draw(RATES),
        betas=draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
        eps=draw(RATES),
        clip=draw(RATES),
    )
    data = DataConfig(
        store=draw(TEXTS),
        seq_len=seq_len,
        order=draw(st.sampled_from(["shuffle", "sequential", "random"])),
        packing=draw(st.sampled_from(["concat", "document"])),
        seed=draw(COUNTS),
    )
    train = TrainConfig(
        steps=1 + warmup + cooldown + draw(COUNTS),
        tokens_per_step=micro_batch * seq_len * draw(SIZES),
        micro_batch=micro_batch,
        eval_every=draw(COUNTS),
        eval_tokens=1 + draw(COUNTS),
        save_every=draw(COUNTS),
        keep_last=draw(SIZES),
        keep_every=draw(COUNTS),
        keep_best=draw(st.booleans()),
        precision=draw(st.sampled_from(["auto", "fp32", "bf16", "fp16"])),
        compile=draw(st.sampled_from(["auto", True, False])),
        deterministic=draw(st.booleans()),
        seed=draw(COUNTS),
        samples=draw(COUNTS),
        sample_tokens=draw(COUNTS),
        sample_prompt=draw(TEXTS),
    )
    return RunConfig(draw(st.sampled_from(["auto", "cpu", "cuda:1", "mps"])), model, optim, data, train)


def flags_of(config: RunConfig) -> list[str]:
    return [
        f"--{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in flatten(config).items()
    ]


def mistakes_of(*arguments: Any, **named: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*arguments, **named)
    return caught.value.mistakes


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@given(config=run_configs(), head=HEADS)
def test_any_configuration_reads_back_equal_from_its_own_toml(tmp_path_factory, config, head):
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_text(to_toml(config, head), encoding="utf-8")
    assert resolve(str(path)) == (config, None)


@given(config=run_configs())
def test_any_configuration_can_be_given_as_flags_over_any_recipe(config):
    assert resolve("gpt2-rope-swiglu", flags_of(config))[0] == config


@pytest.mark.parametrize("name", RECIPES)
def test_a_named_recipe_is_resolved_to_itself(name):
    named = RECIPES[name]()
    assert resolve(name) == (named.config, named)


def test_every_setting_is_an_option_with_a_sentence():
    keys = [option.key for option in options()]
    assert keys == list(flatten(RunConfig()))
    assert keys[0] == "device"
    assert {key.split(".")[0] for key in keys[1:]} == set(SECTIONS)
    for option in options():
        assert len(option.sentence.split()) >= 1, option.key
        assert "\n" not in option.sentence + option.unit


def test_toml_has_every_setting_with_its_sentence_and_unit_behind_the_head():
    text = to_toml(RunConfig(), "a head\nof two lines")
    assert text.startswith("# a head\n# of two lines\ndevice = ")
    for option in options():
        unit = f" [{option.unit}]" if option.unit else ""
        name = option.key.rpartition(".")[2]
        assert any(
            line.startswith(f"{name} = ") and line.endswith(f"  # {option.sentence}{unit}")
            for line in text.splitlines()
        )
    assert list(tomllib.loads(text)) == ["device", *SECTIONS]


def test_defaults_give_way_to_the_recipe_that_to_flags_and_flags_to_the_commands_own(recipe):
    path = recipe("device = 'cpu'\n[optim]\nlr = 1\n[model]\nn_layer = 3\nn_head = 2\n")
    config = resolve(path, ["--model.n_layer", "4", "--model.n-head=3"], {"data.store": "S"})[0]
    assert (config.device, config.optim.lr, config.model.n_layer, config.model.n_head) == ("cpu", 1.0, 4, 3)
    assert config.data == DataConfig(store="S")
    assert config.model.n_embd == ModelConfig().n_embd
    assert resolve(path, ["--device=mps"], {"device": "cuda"})[0].device == "cuda"


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (["--model.n-layer", "3"], "model.n_layer", 3),
        (["--model.n_layer", "3"], "model.n_layer", 3),
        (["--model.n-layer=3"], "model.n_layer", 3),
        (["--model.n-layer=2", "--model.n_layer", "3"], "model.n_layer", 3),
        (["--train.tokens-per-step", "1_048_576"], "train.tokens_per_step", 1_048_576),
        (["--optim.lr", "3e-4"], "optim.lr", 3e-4),
        (["--optim.betas", "0.8,0.9"], "optim.betas", (0.8, 0.9)),
        (["--optim.betas", "[0.8, 0.9]"], "optim.betas", (0.8, 0.9)),
        (["--model.bias", "false"], "model.bias", False),
        (["--model.bias=False"], "model.bias", False),
        (["--model.qk-norm", "TRUE"], "model.qk_norm", True),
        (["--train.compile", "false"], "train.compile", False),
        (["--train.compile", "auto"], "train.compile", "auto"),
        (["--train.sample-prompt=--n=1"], "train.sample_prompt", "--n=1"),
        (["--train.sample-prompt=-1"], "train.sample_prompt", "-1"),
        (["--train.sample-prompt", ""], "train.sample_prompt", ""),
        (["--train.sample-prompt=a=b"], "train.sample_prompt", "a=b"),
        (["--device", "cuda:1"], "device", "cuda:1"),
    ],
)
def test_a_flag_is_read_as_its_settings_type(flags, key, expected):
    value = flatten(resolve("gpt2", flags)[0])[key]
    assert value == expected
    assert type(value) is type(expected)


def test_a_negative_number_is_a_value():
    expected = ["optim.clip is -1.0, it must be at least 0"]
    assert mistakes_of("gpt2", ["--optim.clip=-1"]) == mistakes_of("gpt2", ["--optim.clip", "-1"]) == expected


def test_case_61_all_unknown_keys_of_file_and_flags_are_told_at_once_with_the_nearest_right_one(recipe):
    path = recipe("steps = 3\n[optim]\nwarm_up = 1\n[modelx]\nn_layer = 2\n[model]\nn_heads = 3\nn-embd = 8\n")
    mistakes = mistakes_of(path, ["--train.seeed", "3", "--outt=R", "--xyzzy", "1"], also=["--out", "--data"])
    assert mistakes == [
        "no option --train.seeed (did you mean '--train.seed'?)",
        "no option --outt (did you mean '--out'?)",
        "no option --xyzzy",
        f"{path}: steps: no such setting (did you mean 'train.steps'?)",
        f"{path}: optim.warm_up: no such setting (did you mean 'optim.warmup'?)",
        f"{path}: modelx.n_layer: no such setting (did you mean 'model.n_layer'?)",
        f"{path}: model.n_heads: no such setting (did you mean 'model.n_head'?)",
        f"{path}: model.n-embd: no such setting (did you mean 'model.n_embd'?)",
    ]


@pytest.mark.parametrize("wrong", ["n_layr", "n-layr"])
def test_the_nearest_of_a_wrong_flag_is_a_flag_whether_or_not_the_command_has_options_of_its_own(wrong):
    expected = [f"no option --model.{wrong} (did you mean '--model.n_layer'?)"]
    assert mistakes_of("gpt2", [f"--model.{wrong}", "1"]) == expected
    assert mistakes_of("gpt2", [f"--model.{wrong}", "1"], also=["--out"]) == expected


@pytest.mark.parametrize(
    ("wrong", "right"), [*PEERS_NAMES.items(), ("learing_rate", "optim.lr"), ("lerning_rate", "optim.lr")]
)
def test_case_61_what_peers_call_a_setting_is_told_by_our_name(recipe, wrong, right):
    path = recipe(f"[optim]\n{wrong} = 1\n")
    assert mistakes_of(path) == [f"{path}: optim.{wrong}: no such setting (did you mean '{right}'?)"]
    flag = wrong.replace("_", "-")
    assert mistakes_of("gpt2", [f"--{flag}=1"], also=["--out"]) == [f"no option --{flag} (did you mean '--{right}'?)"]


def test_peers_names_lead_to_settings_that_there_are():
    assert set(PEERS_NAMES.values()) <= {option.key for option in options()}
    assert not set(PEERS_NAMES) & {option.key.rpartition(".")[2] for option in options()}


@pytest.mark.parametrize(
    ("content", "unknown"), [("[modelo]\n", "modelo"), ("[extra]\n", "extra"), ("[model.deep]\n", "model.deep")]
)
def test_case_61_an_unknown_empty_section_is_told(recipe, content, unknown):
    (mistake,) = mistakes_of(recipe(content))
    assert f"mine.toml: {unknown}: no such setting" in mistake


@pytest.mark.parametrize("line", ["learing_rate = 1", "learning_rate: 1", "lrate = 1"])
def test_case_61_a_misspelled_learning_rate_never_trains_with_the_default(recipe, line):
    with pytest.raises(UsageError, match=r"mine\.toml"):
        resolve(recipe(f"[optim]\n{line}\n"))


def test_wrong_keys_values_and_shapes_are_told_together(recipe):
    path = recipe("[model]\nn_layer = 0\nn_haed = 2\n[optim]\nbetas = [0.9]\n[train]\nsteps = 'many'\n")
    mistakes = mistakes_of(path, ["--data.order", "random!", "--optim.clip", "-1"])
    assert len(mistakes) == 6
    for text in (
        "model.n_layer is 0",
        "model.n_haed",
        "optim.betas",
        "train.steps",
        "--data.order",
        "optim.clip is -1.0",
    ):
        assert sum(text in mistake for mistake in mistakes) == 1, text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[model]\nn_layer = 2.0", "model.n_layer is 2.0, expected a whole number"),
        ("[model]\nn_layer = true", "model.n_layer is True, expected a whole number"),
        ("[model]\nn_layer = '2x'", "model.n_layer is '2x', expected a whole number"),
        ("[model]\nbias = 1", "model.bias is 1, expected true or false"),
        ("[model]\nmlp = 'swigl'", "expected one of: gelu_tanh, swiglu, relu2 (did you mean 'swiglu'?)"),
        ("[model]\nmlp = ['swiglu']", "expected one of: gelu_tanh, swiglu, relu2"),
        ("[optim]\nlr = 'fast'", "optim.lr is 'fast', expected a number"),
        ("[optim]\nlr = true", "optim.lr is True, expected a number"),
        ("[optim]\nlr = nan", "optim.lr is nan, it must be finite"),
        ("[optim]\nweight_decay = inf", "optim.weight_decay is inf, it must be finite"),
        ("[model]\nrope_theta = inf", "model.rope_theta is inf, it must be finite"),
        (f"[optim]\nlr = 1{'0' * 400}", "expected a number"),
        ("[optim]\nlr = 2020-01-01", "expected a number"),
        ("[optim]\nbetas = 0.9", "optim.betas is 0.9, expected 2 values like 0.9,0.95"),
        ("[optim]\nbetas = [0.9, 1.0]", "betas are [0.9, 1.0], each must be at least 0 and below 1"),
        ("[optim]\nlr = 1e-4\nmin_lr = 1e-3", "min_lr 0.001 is above lr 0.0001"),
        ("[data]\nstore = 3", "data.store is 3, expected a text"),
        ("[train]\ncompile = 'yes'", "expected true or false"),
        ("[train]\nseed = -1", "train.seed is -1, it must be in 0 .. 2^63 - 1"),
        ("[data]\nseed = 9223372036854775808", "data.seed is 9223372036854775808, it must be in 0 .. 2^63 - 1"),
        ("[model.deep]\nn_layer = 2", "model.deep.n_layer: no such setting"),
        ("[[model]]\nn_layer = 2", "model: no such setting"),
        ("model = 3", "model: no such setting"),
        ("[model]\nn_embd = 100\nn_head = 12", "n_embd 100 is not a multiple of n_head 12; nearest: 96"),
        ("[model]\nn_head = 12\nn_kv_head = 5", "n_head 12 is not a multiple of n_kv_head 5"),
        (
            "[model]\nn_head = 256\nposition = 'rope'",
            "n_embd / n_head is 3; rope turns pairs of channels, so it must be even",
        ),
        (
            "[data]\nseq_len = 2048\n[train]\ntokens_per_step = 32768",
            "data.seq_len 2048 is above model.block_size 1024",
        ),
        ("[optim]\nwarmup = 900\ncooldown = 200", "optim.warmup + optim.cooldown is 1100, above train.steps 1000"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_found_and_what_was_expected(recipe, content, expected):
    (mistake,) = mistakes_of(recipe(content))
    assert expected in mistake


@pytest.mark.parametrize(
    ("tokens", "micro_batch", "unit", "nearest"),
    [(524_289, 16, 16_384, "524288 or 540672"), (7, 16, 16_384, "16384"), (524_288, 3, 3072, "522240 or 525312")],
)
def test_tokens_per_step_that_does_not_divide_names_the_nearest_right_values(tokens, micro_batch, unit, nearest):
    flags = [f"--train.tokens-per-step={tokens}", f"--train.micro-batch={micro_batch}"]
    (mistake,) = mistakes_of("gpt2", flags)
    assert f"tokens_per_step {tokens} is not a multiple of micro_batch {micro_batch} x seq_len 1024" in mistake
    assert mistake.endswith(f"= {unit}; nearest: {nearest}")
    for value in nearest.split(" or "):
        assert resolve("gpt2", [*flags, f"--train.tokens-per-step={value}"])[0].train.tokens_per_step == int(value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--optim.lr"], "--optim.lr needs a value"),
        (
            ["--optim.lr", "--model.n-layer=2"],
            "--optim.lr needs a value (write --optim.lr=VALUE for one that begins with",
        ),
        (["stray"], "'stray' is neither an option nor the value of one"),
        (["--model.n-layer", "2", "3"], "'3' is neither an option nor the value of one"),
        (["--model.n-layer="], "--model.n_layer is '', expected a whole number"),
        (["--model"], "no option --model"),
    ],
)
def test_words_that_are_no_flag_or_lack_a_value_are_told(flags, expected):
    (mistake,) = mistakes_of("gpt2", flags)
    assert mistake.startswith(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sonets", r"no recipe 'sonets' \(did you mean 'sonnets'\?\)"),
        ("gpt3", "there is sonnets, shakespeare, speedrun-cpu, gpt2"),
        ("a" * 300, "no recipe 'aaa"),  # too long for the name of a file
        ("nope.toml", r"nope\.toml: No such file"),
        (".", r"no recipe '\.'"),
    ],
)
def test_a_recipe_that_is_not_there_is_told_with_what_is(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=expected):
        resolve(name)


@pytest.mark.parametrize("content", [b"[optim\n", b"lr = \xff\n", b"lr = 1\nlr = 2\n", b"\x00"])
def test_a_file_that_is_not_toml_is_told_by_name(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.toml: not TOML"):
        resolve(str(path))


def test_differences_are_the_changed_settings_with_both_values():
    before = RunConfig()
    after = dataclasses.replace(before.with_values("optim", lr=1.0, betas=(0.9, 0.99)), device="cpu")
    assert differences(before, before) == {}
    assert differences(before, after) == {
        "device": ("auto", "cpu"),
        "optim.lr": (6e-4, 1.0),
        "optim.betas": ((0.9, 0.95), (0.9, 0.99)),
    }


def test_with_values_checks_the_whole_again():
    with pytest.raises(ConfigError, match=r"data\.seq_len 1024 is above model\.block_size 8"):
        RunConfig().with_values("model", block_size=8)
