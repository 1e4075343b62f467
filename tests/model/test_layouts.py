"""Every combination of switches is a folder of the class that computes it, or of none, and comes back."""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from folders import LETTERS, LLAMA, QWEN3, TINY, edited, logits_of, random_model, read_json, saved
from safetensors.torch import load_file

from quatrain.errors import DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.layouts import GPT2Layout, LlamaLayout, QuatrainLayout, layout_of
from quatrain.model.pretrained import load_model, read_config
from quatrain.settings import option

# Every switch that changes what is computed, with all its values.
POSITIONS, NORMS, MLPS = ("learned", "rope"), ("layernorm", "rmsnorm"), ("gelu_tanh", "swiglu", "relu2")
REST = list(product((0, 2), (False, True), (False, True), (False, True)))  # kv heads, qk_norm, bias, tied


def class_for(switches: dict) -> str | None:
    """The table of docs/formats.md."""
    kind = tuple(switches[name] for name in ("position", "norm", "mlp"))
    grouped, bias, qk_norm = switches["n_kv_head"] not in (0, 4), switches["bias"], switches["qk_norm"]
    if kind[:2] == ("learned", "layernorm") and kind[2] != "swiglu" and bias and not qk_norm and not grouped:
        return "GPT2LMHeadModel"
    if kind == ("rope", "rmsnorm", "swiglu") and not qk_norm:
        return "LlamaForCausalLM"
    if kind == ("rope", "rmsnorm", "swiglu") and not bias:
        return "Qwen3ForCausalLM"
    return None


def opened_by_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    return theirs


def assert_the_same(model: GPT, back: GPT) -> None:
    """The same switches and, with the padding rebuilt, the same weights to the bit, tied as they were."""
    one, other = (replace(config, n_kv_head=config.kv_heads) for config in (model.config, back.config))
    assert one == other
    assert not back.training
    for (name, weight), (other_name, read) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(weight, read), name
    assert (back.head_weight is back.transformer["wte"].weight) == model.config.tied  # case_60
    assert torch.equal(logits_of(back), logits_of(model))


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position", POSITIONS)
def test_the_whole_table_of_switches_comes_back_and_opens_in_the_class_that_computes_it(position, norm, mlp, tmp_path):
    for number, (n_kv_head, qk_norm, bias, tied) in enumerate(REST):
        switches = {"position": position, "norm": norm, "mlp": mlp, "bias": bias, "qk_norm": qk_norm}
        switches |= {"n_kv_head": n_kv_head, "tied": tied}
        model = random_model(**switches)
        folder = saved(model, tmp_path / str(number))
        facts = read_json(folder / "config.json")
        expected = class_for(switches)
        assert facts["architectures"] == ([expected] if expected else []), switches
        assert (facts["model_type"] == "quatrain") == (expected is None)
        assert facts["vocab_size"] == 11  # not the padded one
        assert_the_same(model, load_model(folder))
        if expected:
            theirs = opened_by_transformers(folder)
            assert type(theirs).__name__ == expected
            torch.testing.assert_close(logits_of(theirs), logits_of(model), atol=1e-5, rtol=0, msg=str(switches))
            assert theirs.config.bos_token_id == theirs.config.eos_token_id == LETTERS.eot
            assert theirs.generation_config.bos_token_id == theirs.generation_config.eos_token_id == LETTERS.eot


@pytest.mark.parametrize(
    "switches",
    [
        {"n_kv_head": 4},
        {"vocab_multiple": 1, "dropout": 0.2},
        LLAMA | {"n_kv_head": 1, "rope_theta": 500.0},
        LLAMA | {"n_kv_head": 4, "vocab_multiple": 1, "dropout": 0.2},
        LLAMA | {"n_embd": 200, "n_head": 4, "bias": True},  # an MLP of 576 channels: 8/3 C is rounded up
        QWEN3 | {"n_kv_head": 1, "rope_theta": 1e6, "vocab_multiple": 1, "dropout": 0.2},
    ],
)
def test_numbers_among_the_switches_reach_transformers_and_come_back(switches, tmp_path):
    model = random_model(**switches)
    folder = saved(model, tmp_path)
    assert read_json(folder / "config.json")["model_type"] != "quatrain"
    theirs = opened_by_transformers(folder)
    torch.testing.assert_close(logits_of(theirs), logits_of(model), atol=1e-5, rtol=0)
    back = load_model(folder)
    assert replace(back.config, vocab_multiple=1, n_kv_head=0) == replace(model.config, vocab_multiple=1, n_kv_head=0)
    theirs.save_pretrained(tmp_path / "theirs")  # dropout too goes the whole way round
    assert read_config(tmp_path / "theirs")[0] == back.config


@dataclass(frozen=True)
class Coming(ModelConfig):
    """With a switch that a later version has."""

    later: float = option(0.0, "0: off")


@pytest.mark.parametrize(("switches", "model_type"), [({}, "gpt2"), (LLAMA, "llama"), (QWEN3, "qwen3")])
def test_a_switch_that_a_class_has_never_heard_of_must_be_off(switches, model_type):
    assert layout_of(Coming(**TINY, **switches)).model_type == model_type
    assert layout_of(Coming(**TINY, **switches, zero_init=True, dropout=0.1)).model_type == model_type
    assert layout_of(Coming(**TINY, **switches, later=30.0)).model_type == "quatrain"
    for switch in ({"logit_softcap": 30.0}, {"value_residual": True}, {"embedding_shortcut": True}):
        assert layout_of(ModelConfig(**TINY, **switches, **switch)).model_type == "quatrain"


def test_how_weights_begin_and_are_padded_stands_in_no_folder():
    assert "vocab_multiple" not in QuatrainLayout().describe(ModelConfig(**TINY, position="rope"))
    assert "zero_init" not in QuatrainLayout().describe(Coming(**TINY, position="rope", zero_init=True))


def random_of_transformers(model_type: str, **entries) -> torch.nn.Module:
    """A tiny model as the class itself makes it, each weight away from its initial value."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 12}
    sizes |= {"intermediate_size": 64, "head_dim": 4, "num_key_value_heads": 4}
    if model_type == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12}
    torch.manual_seed(0)
    ids = {"vocab_size": 11, "bos_token_id": 10, "eos_token_id": 10}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | ids | entries)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return theirs


OF_GPT2 = [
    {"activation_function": activation, "n_inner": inner}
    for activation, inner in product(("gelu_new", "gelu_pytorch_tanh", "relu2"), (None, 64))
]
OF_LLAMA = [
    {"num_key_value_heads": heads, "attention_bias": bias, "mlp_bias": bias}
    for heads, bias in product((1, 2, 4), (False, True))
]
OF_QWEN3 = [{"num_key_value_heads": heads} for heads in (1, 2, 4)]
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
FOREIGN = [
    *(("gpt2", entries) for entries in OF_GPT2),
    *(("llama", entries) for entries in [*OF_LLAMA, THETA, {"head_dim": None}]),
    *(("qwen3", entries) for entries in [*OF_QWEN3, THETA, {"sliding_window": 8, "max_window_layers": 0}]),
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("model_type", "entries"), FOREIGN)
def test_a_folder_of_transformers_gives_its_logits_here(model_type, entries, tied, tmp_path):
    theirs = random_of_transformers(model_type, tie_word_embeddings=tied, **entries)
    theirs.save_pretrained(tmp_path)

    model = load_model(tmp_path)
    torch.testing.assert_close(logits_of(model), logits_of(theirs), atol=1e-5, rtol=0)
    assert (model.head_weight is model.transformer["wte"].weight) == tied  # case_60
    again = load_file(saved(model, tmp_path / "again") / "model.safetensors")
    original = load_file(tmp_path / "model.safetensors")
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], original[name]) for name in original)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rope_theta_is_read_where_transformers_before_5_wrote_it(model_type, tmp_path):
    theirs = random_of_transformers(model_type, **THETA)
    theirs.save_pretrained(tmp_path)
    facts = read_json(tmp_path / "config.json")
    del facts["rope_parameters"]
    for scaling in (None, {"type": "default"}, {"rope_type": "default"}):
        facts |= {"rope_theta": 500, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(facts))
        torch.testing.assert_close(logits_of(load_model(tmp_path)), logits_of(theirs), atol=1e-5, rtol=0)
    folder = saved(load_model(tmp_path), tmp_path / "again")
    assert read_json(folder / "config.json")["rope_theta"] == 500.0  # and there they find ours
    del facts["rope_theta"], facts["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert read_config(tmp_path)[0].rope_theta == opened_by_transformers(tmp_path).config.rope_parameters["rope_theta"]


def test_a_missing_transpose_is_noticed(tmp_path, monkeypatch):
    model = random_model()  # without attn.c_proj, which is square: no shape tells that it lies the wrong way round
    monkeypatch.setattr(GPT2Layout, "conv1d", ("c_attn.weight", "mlp.c_proj.weight", "c_fc.weight"))
    theirs = opened_by_transformers(saved(model, tmp_path))
    assert (logits_of(theirs) - logits_of(model)).abs().max() > 1e-2


def test_gate_and_up_taken_for_each_other_are_noticed(tmp_path, monkeypatch):
    model = random_model(**LLAMA)
    swapped = LlamaLayout.names | {"mlp.c_gate": "mlp.up_proj", "mlp.c_fc": "mlp.gate_proj"}
    monkeypatch.setattr(LlamaLayout, "names", swapped)
    theirs = opened_by_transformers(saved(model, tmp_path))
    assert (logits_of(theirs) - logits_of(model)).abs().max() > 1e-2


def test_no_class_of_transformers_pretends_to_read_other_switches(tmp_path):
    from transformers import AutoModelForCausalLM

    saved(random_model(position="rope"), tmp_path)
    with pytest.raises(ValueError, match="quatrain"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (
            {"activation_function": "gelu"},
            "config.json: activation_function is 'gelu', expected one of gelu_pytorch_tanh, gelu_new, relu2",
        ),
        ({"activation_function": ["relu2"]}, "activation_function is"),
        ({"layer_norm_epsilon": 1e-6}, "config.json: layer_norm_epsilon is 1e-06, .*1e-05"),
        ({"n_inner": 32}, "n_inner is 32.*64"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"attn_pdrop": 0.3}, "config.json: .*'attn_pdrop': 0.3.* differ; a GPT here has one dropout"),
        ({"n_head": None}, "no entry 'n_head'"),
        ({"n_positions": None}, "no entry 'n_positions'"),
        ({"vocab_size": None}, "no entry 'vocab_size'"),
        ({"model_type": "mamba"}, "config.json: model_type is 'mamba', expected one of: gpt2, llama, qwen3, quatrain"),
        ({"model_type": None}, "config.json: model_type is None, expected one of: gpt2, llama, qwen3, quatrain"),
        ({"model_type": []}, r"config.json: model_type is \[\], expected one of"),
        ({"n_layer": 3}, r"missing: \['transformer\.h\.2\."),
        ({"n_layer": 1}, r"not known: \['transformer\.h\.1\."),
        ({"vocab_size": 12}, r"wte\.weight has shape \(11, 16\), expected \(12, 16\)"),
        ({"n_positions": 13}, r"wpe\.weight has shape \(12, 16\), expected \(13, 16\)"),
    ],
)
def test_a_gpt2_that_no_model_here_can_be_is_refused_by_entry(entries, named, tmp_path):
    with pytest.raises(DataError, match=named):
        load_model(edited(tmp_path, entries))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"intermediate_size": 11008}, "config.json: intermediate_size is 11008, a GPT here has 64"),
        ({"head_dim": 8}, "config.json: head_dim is 8, a GPT here has 4"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, a GPT here has silu"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, a GPT here has 1e-06"),
        ({"rope_parameters": LLAMA3}, "rope_type is llama3 .*without scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is linear .*without scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention.*without scaling"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
        ({"rope_parameters": {"rope_theta": "far"}}, "rope_theta is 'far', expected a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, a GPT here rotates every channel"),
        ({"attention_dropout": 0.3}, "'attention_dropout': 0.3.* differ; a GPT here has one dropout"),
        ({"num_key_value_heads": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
        ({"hidden_size": None}, "no entry 'hidden_size'"),
        ({"hidden_size": "wide"}, "n_embd is 'wide', expected a whole number"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"missing: \['model\.layers\.2\."),
        ({"tie_word_embeddings": False}, r"missing: \['lm_head\.weight'\]"),
        ({"vocab_size": 12}, r"embed_tokens\.weight has shape \(11, 16\), expected \(12, 16\)"),
        ({"num_key_value_heads": 2}, r"k_proj\.weight has shape \(16, 16\), expected \(8, 16\)"),
    ],
)
def test_a_llama_or_qwen3_that_no_model_here_can_be_is_refused_by_entry(model_type, entries, named, tmp_path):
    with pytest.raises(DataError, match=named):
        load_model(edited(tmp_path, entries, **(QWEN3 if model_type == "qwen3" else LLAMA)))


@pytest.mark.parametrize(
    ("switches", "entries", "named"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias is True and mlp_bias False; a GPT here has both or neither"),
        (LLAMA, {"mlp_bias": True}, "attention_bias is False and mlp_bias True; a GPT here has both or neither"),
        (QWEN3, {"attention_bias": True}, "attention_bias is True, a GPT here has False"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window is True, a GPT here has False"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*sliding_attention"),
    ],
)
def test_what_one_of_the_two_classes_can_say_beyond_is_refused_by_entry(switches, entries, named, tmp_path):
    with pytest.raises(DataError, match=named):
        read_config(edited(tmp_path, entries, **switches))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"soft_cap": 30.0}, "config.json: 'soft_cap' is not a switch that this quatrain knows; a newer one may have"),
        ({"qk_norm": None}, "config.json: no entry 'qk_norm'"),
        ({"n_layer": "two"}, "config.json: n_layer is 'two', expected a whole number"),
        ({"n_layer": 2.5}, "config.json: n_layer is 2.5, expected a whole number"),
        ({"bias": 1}, "config.json: bias is 1, expected true or false"),
        ({"position": "sine"}, "config.json: position is 'sine', expected one of: learned, rope"),
        ({"dropout": 1.5}, "config.json: dropout is 1.5, it must be at least 0 and below 1"),
        ({"vocab_size": 0}, "config.json: vocab_size is 0, expected at least 1"),
    ],
)
def test_a_quatrain_config_holds_the_switches_of_the_first_version_and_none_unknown(entries, named, tmp_path):
    with pytest.raises(DataError, match=named):
        read_config(edited(tmp_path, entries, position="rope"))


def test_a_quatrain_folder_from_before_a_switch_has_its_default(tmp_path, monkeypatch):
    monkeypatch.setattr(QuatrainLayout, "always", QuatrainLayout.always - {"rope_theta"})  # as if that came later
    folder = edited(tmp_path, {"rope_theta": None}, position="rope", rope_theta=500.0)
    assert read_config(folder)[0].rope_theta == ModelConfig.rope_theta


def test_a_llama_written_as_quatrain_before_there_was_a_layout_still_loads(tmp_path, monkeypatch):
    model = random_model(**LLAMA)
    monkeypatch.setattr("quatrain.model.pretrained.layout_of", lambda config: QuatrainLayout())
    folder = saved(model, tmp_path)
    monkeypatch.undo()
    assert read_json(folder / "config.json")["model_type"] == "quatrain"
    assert_the_same(model, load_model(folder))
