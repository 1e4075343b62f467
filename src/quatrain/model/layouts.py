"""Which class of transformers computes what the switches say, and how its files name and store the weights.

A class expresses a `ModelConfig` if its config.json, read again, gives every switch back. A switch that a class
has never heard of is therefore expressed by it as long as it has its default, and by `QuatrainLayout` always.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from quatrain.errors import DataError
from quatrain.model.attention import RMS_EPS
from quatrain.model.config import Mlp, ModelConfig
from quatrain.model.gpt import INIT_STD, LAYERNORM_EPS

Weights = dict[str, Tensor]
Facts = dict[str, Any]  # entries of a config.json

# How memory is padded and how weights begin: no file holds them, a folder gives back their defaults.
NOT_IN_FILES = frozenset({"vocab_multiple", "zero_init"})


def spelled_once(config: ModelConfig) -> ModelConfig:
    """The same network with each switch written in one way."""
    theta = config.rope_theta if config.position == "rope" else ModelConfig.rope_theta
    return replace(config, n_kv_head=config.kv_heads, rope_theta=theta)


def as_stored(config: ModelConfig) -> ModelConfig:
    """The switches as a folder of this model gives them back, each written in one way."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(config) if field.name in NOT_IN_FILES}
    return replace(spelled_once(config), **defaults)


class Layout(ABC):
    """How one model class of Hugging Face stores a GPT."""

    model_type: str
    architecture: str | None  # the class in transformers, if there is one
    # What this class could also compute and a GPT here does not, with the value that switches it off.
    fixed: ClassVar[Facts] = {}

    @abstractmethod
    def describe(self, config: ModelConfig) -> Facts:
        """What config.json says beyond model_type, architectures and the ids of eot."""

    @abstractmethod
    def switches_from(self, facts: Facts) -> dict[str, Any]:
        """The fields of `ModelConfig` that a config.json describes.

        Raises `DataError` for what a GPT here cannot be, and `KeyError` for an entry that is not there.
        """

    @abstractmethod
    def views(self, name: str, weight: Tensor, config: ModelConfig) -> Weights:
        """One weight of memory, (out, in), as views by the names and in the shapes of the file."""

    def implied(self, config: ModelConfig) -> Facts:
        """Entries that follow from the switches; null stands for the same."""
        return {}

    def expresses(self, config: ModelConfig) -> bool:
        """Whether this class computes exactly what the switches say."""
        stored = as_stored(config)
        try:
            given = self.switches_from(self.describe(stored))
        except DataError:
            return False
        return all(given.get(field.name, field.default) == getattr(stored, field.name) for field in fields(stored))

    def check(self, facts: Facts, config: ModelConfig) -> None:
        """Raise `DataError` for an entry beside the switches that says what a GPT here does not do."""
        for key, expected in {**self.fixed, **self.implied(config)}.items():
            found = facts.get(key, expected)
            if found != expected and (found is not None or key in self.fixed):
                raise DataError(f"{key} is {found}, a GPT here has {expected}")


class GPT2Layout(Layout):
    """GPT2LMHeadModel: its Conv1D stores the weights of linear layers as (in, out)."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    activations: ClassVar[dict[Mlp, str]] = {"gelu_tanh": "gelu_new", "relu2": "relu2"}
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    fixed: ClassVar[Facts] = {
        "layer_norm_epsilon": LAYERNORM_EPS,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }

    def describe(self, config: ModelConfig) -> Facts:
        return {
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_ctx": config.block_size,
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_inner": None,
            "activation_function": self.activations.get(config.mlp),
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "initializer_range": INIT_STD,
            "tie_word_embeddings": config.tied,
            "use_cache": True,
            **self.fixed,
        }

    def switches_from(self, facts: Facts) -> dict[str, Any]:
        activation = str(facts.get("activation_function", "gelu_new"))
        mlps: dict[str, Mlp] = {"gelu_pytorch_tanh": "gelu_tanh"}
        mlps.update({name: mlp for mlp, name in self.activations.items()})
        if activation not in mlps:
            raise DataError(f"activation_function is '{activation}', expected one of {', '.join(mlps)}")
        return {
            "n_layer": facts["n_layer"],
            "n_head": facts["n_head"],
            "n_kv_head": facts["n_head"],
            "n_embd": facts["n_embd"],
            "block_size": facts["n_positions"],
            "vocab_size": facts["vocab_size"],
            "position": "learned",
            "norm": "layernorm",
            "mlp": mlps[activation],
            "bias": True,
            "qk_norm": False,
            "tied": facts.get("tie_word_embeddings", True),
            "dropout": _one_dropout({key: facts.get(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}),
        }

    def implied(self, config: ModelConfig) -> Facts:
        return {"n_inner": config.mlp_width}

    def views(self, name: str, weight: Tensor, config: ModelConfig) -> Weights:
        return {name: weight.t() if name.endswith(self.conv1d) else weight}


class LlamaLayout(Layout):
    """LlamaForCausalLM: queries, keys and values apart, the rotation of half-split channels, a gated MLP.

    This class drops attention weights alone, and in training alone. Our dropout of embeddings and block outputs
    stands beside it by GPT-2's names, which transformers keeps and does not use: it changes no logits.
    """

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    fixed: ClassVar[Facts] = {"hidden_act": "silu", "rms_norm_eps": RMS_EPS}
    names: ClassVar[dict[str, str]] = {  # the part of a name behind `transformer.h.N.`, and behind `model.layers.N.`
        "ln_1": "input_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "ln_2": "post_attention_layernorm",
        "mlp.c_gate": "mlp.gate_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    outside: ClassVar[dict[str, str]] = {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }

    def describe(self, config: ModelConfig) -> Facts:
        return {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.block_size,
            "hidden_size": config.n_embd,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": config.kv_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "rope_theta": config.rope_theta,  # where transformers before 5 and other programs look for it
            "attention_dropout": config.dropout,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "initializer_range": INIT_STD,
            "tie_word_embeddings": config.tied,
            "use_cache": True,
            **self.fixed,
            **self.implied(config),
            **self.biases(config),
        }

    def biases(self, config: ModelConfig) -> Facts:
        """The entries that say which linear layers have biases."""
        return {"attention_bias": config.bias, "mlp_bias": config.bias}

    def switches_from(self, facts: Facts) -> dict[str, Any]:
        return {
            "n_layer": facts["num_hidden_layers"],
            "n_head": facts["num_attention_heads"],
            "n_kv_head": facts.get("num_key_value_heads") or facts["num_attention_heads"],
            "n_embd": facts["hidden_size"],
            "block_size": facts["max_position_embeddings"],
            "vocab_size": facts["vocab_size"],
            "position": "rope",
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "bias": self.bias_from(facts),
            "qk_norm": False,
            "tied": facts.get("tie_word_embeddings", False),
            "dropout": _one_dropout(
                {key: facts.get(key, 0.0) for key in ("attention_dropout", "embd_pdrop", "resid_pdrop")}
            ),
            "rope_theta": _rope_theta(facts),
        }

    def bias_from(self, facts: Facts) -> bool:
        """Whether the linear layers have biases: all of them or none."""
        attention, mlp = facts.get("attention_bias", False), facts.get("mlp_bias", False)
        if attention != mlp:
            raise DataError(f"attention_bias is {attention} and mlp_bias {mlp}; a GPT here has both or neither")
        return cast(bool, attention)

    def implied(self, config: ModelConfig) -> Facts:
        return {"intermediate_size": config.mlp_width, "head_dim": config.head_dim}

    def views(self, name: str, weight: Tensor, config: ModelConfig) -> Weights:
        if name in self.outside:
            return {self.outside[name]: weight}
        _, _, number, inner = name.split(".", 3)
        part, kind = inner.rsplit(".", 1)
        block = f"model.layers.{number}"
        if part != "attn.c_attn":
            return {f"{block}.{self.names[part]}.{kind}": weight}
        heads = torch.split(weight, [config.n_embd, *2 * [config.kv_heads * config.head_dim]])  # rows q, k, v
        return {f"{block}.self_attn.{letter}_proj.{kind}": rows for letter, rows in zip("qkv", heads, strict=True)}


class Qwen3Layout(LlamaLayout):
    """Qwen3ForCausalLM: Llama with a norm over each head's queries and keys; its MLP has no biases."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fixed: ClassVar[Facts] = {**LlamaLayout.fixed, "attention_bias": False, "use_sliding_window": False}

    def biases(self, config: ModelConfig) -> Facts:
        return {}

    def switches_from(self, facts: Facts) -> dict[str, Any]:
        return super().switches_from(facts) | {"qk_norm": True}

    def bias_from(self, facts: Facts) -> bool:
        return False

    def implied(self, config: ModelConfig) -> Facts:
        return super().implied(config) | {"layer_types": ["full_attention"] * config.n_layer}


class QuatrainLayout(Layout):
    """Every other combination: memory's layout and the switches by their own names; loadable for ever."""

    model_type = "quatrain"
    architecture = None
    switches = frozenset(field.name for field in fields(ModelConfig)) - NOT_IN_FILES
    other_entries = frozenset({"model_type", "architectures", "dtype", "bos_token_id", "eos_token_id"})
    # Every such folder has these. A switch that came later is absent from folders before it, and then has its default.
    shape = frozenset({"n_layer", "n_head", "n_kv_head", "n_embd", "block_size", "vocab_size"})
    always = shape | {"position", "norm", "mlp", "bias", "qk_norm", "tied", "dropout", "rope_theta"}

    def expresses(self, config: ModelConfig) -> bool:
        return True

    def describe(self, config: ModelConfig) -> Facts:
        values = asdict(config) | {"n_kv_head": config.kv_heads}
        return {name: value for name, value in values.items() if name in self.switches}

    def switches_from(self, facts: Facts) -> dict[str, Any]:
        unknown = sorted(facts.keys() - self.switches - self.other_entries)
        if unknown:
            raise DataError(f"'{unknown[0]}' is not a switch that this quatrain knows; a newer one may have written it")
        return {name: facts[name] for name in self.switches & (self.always | facts.keys())}

    def views(self, name: str, weight: Tensor, config: ModelConfig) -> Weights:
        return {name: weight}


LAYOUTS: tuple[Layout, ...] = (GPT2Layout(), LlamaLayout(), Qwen3Layout(), QuatrainLayout())


def layout_of(config: ModelConfig) -> Layout:
    """The first layout that expresses the switches."""
    return next(layout for layout in LAYOUTS if layout.expresses(config))


def _one_dropout(dropouts: Mapping[str, float]) -> float:
    first, *others = dropouts.values()
    if any(other != first for other in others):
        raise DataError(f"{dropouts} differ; a GPT here has one dropout")
    return first


def _rope_theta(facts: Facts) -> Any:
    """The base of a plain rotation: in `rope_parameters` (transformers 5) or beside `rope_scaling` (before)."""
    rope = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise DataError(f"rope_parameters is {rope}, expected an object with rope_type and rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    other = sorted(rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if kind != "default" or other:
        raise DataError(f"rope_type is {kind} ({', '.join(other)}), a GPT here rotates without scaling")
    share = rope.get("partial_rotary_factor", facts.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise DataError(f"partial_rotary_factor is {share}, a GPT here rotates every channel")
    return rope.get("rope_theta", facts.get("rope_theta", 10000.0))
