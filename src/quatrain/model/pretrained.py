"""A model as a Hugging Face folder, both ways.

Each `Layout` says which switches it expresses, how it names and stores weights, and what its config.json
says. A combination that no class of transformers expresses is written as `model_type: "quatrain"`.
Files hold the true vocabulary: the padding of the embedding is rebuilt at load.
"""

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from quatrain.errors import DataError, UsageError
from quatrain.files import writing
from quatrain.model.config import Mlp, ModelConfig
from quatrain.model.gpt import GPT, INIT_STD, LAYERNORM_EPS, VOCABULARY_TABLES
from quatrain.settings import coerce
from quatrain.text.tokenizer_json import EOT_TEXT
from quatrain.text.tokenizers import Tokenizer, load_tokenizer

Weights = dict[str, Tensor]


class Layout(ABC):
    """How one model class of Hugging Face stores a GPT."""

    model_type: str
    architecture: str | None  # the class in transformers, if there is one

    @abstractmethod
    def expresses(self, config: ModelConfig) -> bool:
        """Whether this class computes exactly what the switches say."""

    @abstractmethod
    def describe(self, config: ModelConfig) -> dict[str, Any]:
        """What config.json says beyond model_type, architectures and the ids of eot."""

    @abstractmethod
    def switches_from(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The fields of `ModelConfig` that a config.json describes.

        Raises `DataError` for what a GPT here cannot be, and `KeyError` for an entry that is not there.
        """

    def to_disk(self, name: str, weight: Tensor) -> Tensor:
        """One weight as the file stores it, from memory's (out, in)."""
        return weight

    def from_disk(self, name: str, weight: Tensor) -> Tensor:
        """The inverse of `to_disk`."""
        return weight


class GPT2Layout(Layout):
    """GPT2LMHeadModel: its Conv1D stores the weights of linear layers as (in, out)."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    activations: ClassVar[dict[Mlp, str]] = {"gelu_tanh": "gelu_new", "relu2": "relu2"}
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    # What this class could also compute and a GPT here does not, with the value that switches it off.
    fixed: ClassVar[dict[str, object]] = {
        "layer_norm_epsilon": LAYERNORM_EPS,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }

    def expresses(self, config: ModelConfig) -> bool:
        return (
            config.position == "learned"
            and config.norm == "layernorm"
            and config.mlp in self.activations
            and config.bias
            and not config.qk_norm
            and config.kv_heads == config.n_head
        )

    def describe(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_ctx": config.block_size,
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_inner": None,
            "activation_function": self.activations[config.mlp],
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "initializer_range": INIT_STD,
            "tie_word_embeddings": config.tied,
            "use_cache": True,
            **self.fixed,
        }

    def switches_from(self, facts: dict[str, Any]) -> dict[str, Any]:
        for key, expected in {**self.fixed, "n_inner": facts.get("n_inner") and 4 * facts["n_embd"]}.items():
            if facts.get(key, expected) != expected:
                raise DataError(f"{key} is {facts[key]}, a GPT here has {expected}")
        activation = facts.get("activation_function", "gelu_new")
        mlps: dict[str, Mlp] = {"gelu_pytorch_tanh": "gelu_tanh"}
        mlps.update({name: mlp for mlp, name in self.activations.items()})
        if activation not in mlps:
            raise DataError(f"activation_function is '{activation}', expected one of {', '.join(mlps)}")
        dropouts = {key: facts.get(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
        if len(set(dropouts.values())) > 1:
            raise DataError(f"{dropouts} differ; a GPT here has one dropout")
        return {
            "n_layer": facts["n_layer"],
            "n_head": facts["n_head"],
            "n_embd": facts["n_embd"],
            "block_size": facts["n_positions"],
            "vocab_size": facts["vocab_size"],
            "mlp": mlps[activation],
            "tied": facts.get("tie_word_embeddings", True),
            "dropout": dropouts["embd_pdrop"],
        }

    def to_disk(self, name: str, weight: Tensor) -> Tensor:
        return weight.t() if name.endswith(self.conv1d) else weight

    def from_disk(self, name: str, weight: Tensor) -> Tensor:
        return weight.t() if name.endswith(self.conv1d) and weight.dim() == 2 else weight


class QuatrainLayout(Layout):
    """Every other combination: memory's layout and the switches by their own names; loadable for ever."""

    model_type = "quatrain"
    architecture = None
    switches = frozenset(field.name for field in fields(ModelConfig)) - {"vocab_multiple"}  # that is memory's affair
    other_entries = frozenset({"model_type", "architectures", "dtype", "bos_token_id", "eos_token_id"})

    def expresses(self, config: ModelConfig) -> bool:
        return True

    def describe(self, config: ModelConfig) -> dict[str, Any]:
        values = asdict(config) | {"n_kv_head": config.kv_heads}
        return {name: value for name, value in values.items() if name in self.switches}

    def switches_from(self, facts: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(facts.keys() - self.switches - self.other_entries)
        if unknown:
            raise DataError(f"'{unknown[0]}' is not a switch that this quatrain knows; a newer one may have written it")
        return {name: facts[name] for name in self.switches}


LAYOUTS: tuple[Layout, ...] = (GPT2Layout(), QuatrainLayout())


def layout_of(config: ModelConfig) -> Layout:
    """The first layout that expresses the switches."""
    return next(layout for layout in LAYOUTS if layout.expresses(config))


def disk_weights(model: GPT) -> Weights:
    """The model's weights by the names and in the shapes of its folder, on the CPU."""
    return {name: weight.cpu().contiguous() for name, weight in _on_disk(model).items()}


def disk_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes in a model's folder, computed without memory for its weights."""
    with torch.device("meta"):
        model = GPT(config)
    return {name: tuple(weight.shape) for name, weight in _on_disk(model).items()}


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the true vocabulary, tied ones once."""
    return sum(math.prod(shape) for shape in disk_shapes(config).values())


def _on_disk(model: GPT) -> Weights:
    layout = layout_of(model.config)
    parameters = model.named_parameters()  # tied weights once
    return {name: layout.to_disk(name, _trim(name, weight.detach(), model.config)) for name, weight in parameters}


def save_model(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights and tokenizer files into an existing folder; the same model gives the same bytes."""
    config, layout = model.config, layout_of(model.config)
    if tokenizer.vocab_size != config.vocab_size:
        raise DataError(f"a tokenizer of {tokenizer.vocab_size} ids beside a model of vocab_size {config.vocab_size}")
    facts = {
        "architectures": [layout.architecture] if layout.architecture else [],
        "model_type": layout.model_type,
        "dtype": "float32",
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        **layout.describe(config),
    }
    eot = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    with writing(folder):
        (folder / "config.json").write_bytes(_as_json(facts))
        (folder / "generation_config.json").write_bytes(_as_json(eot))
        (folder / "model.safetensors").write_bytes(save(disk_weights(model), metadata={"format": "pt"}))
        (folder / "tokenizer.json").write_bytes(tokenizer.json)
        (folder / "tokenizer_config.json").write_bytes(_as_json(_tokenizer_config(tokenizer, config)))


def load_model(folder: Path, device: torch.device | str = "cpu") -> GPT:
    """The model of a folder that `save_model` or transformers wrote, fp32, in evaluation mode.

    Raises `DataError` for what is not such a folder, and names the first weight that does not fit.
    """
    config, layout = read_config(folder)
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder}/model.safetensors: cannot be read ({error})") from error
    model = GPT(config)
    _load_weights(model, {name: layout.from_disk(name, weight) for name, weight in weights.items()}, folder)
    return model.to(device).eval()


def read_config(folder: Path) -> tuple[ModelConfig, Layout]:
    """The switches of a model folder and its layout; raises `DataError` as `load_model` does."""
    path = folder / "config.json"
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a model's description ({error})") from error
    layouts = {layout.model_type: layout for layout in LAYOUTS}
    model_type = facts.get("model_type") if isinstance(facts, dict) else None
    if model_type not in layouts:
        raise DataError(f"{path}: model_type is {model_type!r}, expected one of: {', '.join(layouts)}")
    try:
        return _config_of(layouts[model_type].switches_from(facts)), layouts[model_type]
    except KeyError as error:
        raise DataError(f"{path}: no entry {error}") from error
    except (UsageError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def _config_of(switches: dict[str, Any]) -> ModelConfig:
    kinds = get_type_hints(ModelConfig)
    values = {}
    for name, value in switches.items():
        try:
            values[name] = coerce(value, kinds[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    if values["vocab_size"] < 1:
        raise ValueError(f"vocab_size is {values['vocab_size']}, expected at least 1")
    return ModelConfig(**values)


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    try:
        eot_text = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token", EOT_TEXT)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no tokenizer_config.json that can be read ({error})") from error
    return load_tokenizer(folder / "tokenizer.json", eot_text)


@torch.no_grad()
def _load_weights(model: GPT, weights: Weights, folder: Path) -> None:
    wanted = dict(model.named_parameters())
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        raise DataError(f"{folder}: weights missing: {missing[:3] or 'none'}; not known: {unknown[:3] or 'none'}")
    for name, parameter in wanted.items():
        target = _trim(name, parameter, model.config)
        if target.shape != weights[name].shape:
            raise DataError(f"{folder}: {name} has shape {tuple(weights[name].shape)}, expected {tuple(target.shape)}")
        target.copy_(weights[name])  # into the memory that the model already shares between tied weights


def _trim(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """The rows of the true vocabulary; other weights whole."""
    return weight[: config.vocab_size] if name in VOCABULARY_TABLES else weight


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eot_text,
        "eos_token": tokenizer.eot_text,
        "model_max_length": config.block_size,
        "split_special_tokens": True,  # no text can produce eot
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def _as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
