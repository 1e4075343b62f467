"""A model as a Hugging Face folder, both ways.

A `Layout` gives the weights of memory as views in the shapes of the file: saving reads them, loading fills them.
Files hold the true vocabulary: the padding of the embedding is rebuilt at load.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quatrain.errors import DataError, UsageError
from quatrain.files import writing
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT, VOCABULARY_TABLES
from quatrain.model.layouts import LAYOUTS, Facts, Layout, Weights, layout_of
from quatrain.settings import coerce
from quatrain.text.tokenizer_json import EOT_TEXT
from quatrain.text.tokenizers import Tokenizer, load_tokenizer

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"  # of weights in several files
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def disk_weights(model: GPT) -> Weights:
    """The model's weights by the names and in the shapes of its folder, on the CPU."""
    views = _views(model, layout_of(model.config))
    return {name: weight.detach().cpu().contiguous() for name, weight in views.items()}


def disk_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes in a model's folder, computed without memory for its weights."""
    return {name: tuple(weight.shape) for name, weight in _views(_unfilled(config), layout_of(config)).items()}


def true_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters by memory's names, tied ones once, as they are over the true vocabulary."""
    return {name: tuple(weight.shape) for name, weight in _true_weights(_unfilled(config)).items()}


def memory_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The same with the padding of the vocabulary."""
    return {name: tuple(weight.shape) for name, weight in _unfilled(config).named_parameters()}


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the true vocabulary, tied ones once."""
    return sum(math.prod(shape) for shape in true_shapes(config).values())


def _views(model: GPT, layout: Layout) -> Weights:
    views: Weights = {}
    for name, weight in _true_weights(model).items():
        views |= layout.views(name, weight, model.config)
    return views


def _true_weights(model: GPT) -> Weights:
    rows = model.config.vocab_size
    parameters = model.named_parameters()  # tied weights once
    return {name: weight[:rows] if name in VOCABULARY_TABLES else weight for name, weight in parameters}


def _unfilled(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


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
        write_tensors(folder / WEIGHTS, disk_weights(model), {"format": "pt"})
        (folder / "tokenizer.json").write_bytes(tokenizer.json)
        (folder / "tokenizer_config.json").write_bytes(_as_json(_tokenizer_config(tokenizer, config)))


def write_tensors(path: Path, tensors: Weights, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file straight from the tensors' memory; equal tensors give equal bytes.

    Raises `OSError` as other writes do: the library's own error says its number in words.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def load_model(folder: Path, device: torch.device | str = "cpu") -> GPT:
    """The model of a folder that `save_model` or transformers wrote, fp32, in evaluation mode.

    Raises `DataError` for what is not such a folder, and names the first weight that does not fit.
    """
    config, layout = read_config(folder)
    weights = _read_weights(folder)
    model = _unfilled(config).to_empty(device="cpu")  # draws nothing: a training may be going on in another thread
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the padding of the vocabulary, which no file holds
    _fill(_views(model, layout), weights, folder)
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
    layout = layouts.get(str(model_type))
    if layout is None:
        raise DataError(f"{path}: model_type is {model_type!r}, expected one of: {', '.join(layouts)}")
    try:
        config = _config_of(layout.switches_from(facts))
        layout.check(facts, config)
    except KeyError as error:
        raise DataError(f"{path}: no entry {error}") from error
    except (UsageError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    return config, layout


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


def _read_weights(folder: Path) -> Weights:
    """The weights of a folder, from one file or from those that its index names."""
    weights: Weights = {}
    for name in _weight_files(folder):
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{folder / name}: cannot be read ({error})") from error
    return weights


def _weight_files(folder: Path) -> list[str]:
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        _refuse_pickles(folder)
        return [WEIGHTS]
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: no weight_map from weights to files ({error!r})") from error
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise DataError(f"{index}: '{name}' is not the name of a .safetensors file in this folder")
    return names


def _refuse_pickles(folder: Path) -> None:
    """Raise `DataError` where weights are there as a pickle alone: reading one can run any code."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles and not (folder / WEIGHTS).exists():
        raise DataError(
            f"{folder}: {pickles[0]} is a pickle, which can run any code when it is read, and there is no {WEIGHTS}; "
            f"save the model again with transformers' save_pretrained, which writes safetensors"
        )


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    try:
        eot_text = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token", EOT_TEXT)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no tokenizer_config.json that can be read ({error})") from error
    return load_tokenizer(folder / "tokenizer.json", eot_text)


@torch.no_grad()
def _fill(views: Weights, weights: Weights, folder: Path) -> None:
    """Copy a file's weights into the memory that a model already shares between tied ones."""
    missing, unknown = sorted(views.keys() - weights.keys()), sorted(weights.keys() - views.keys())
    if missing or unknown:
        raise DataError(f"{folder}: weights missing: {missing[:3] or 'none'}; not known: {unknown[:3] or 'none'}")
    for name, view in views.items():
        weight = weights[name]
        if weight.shape != view.shape:
            raise DataError(f"{folder}: {name} has shape {tuple(weight.shape)}, expected {tuple(view.shape)}")
        if weight.dtype not in FLOATS:
            raise DataError(f"{folder}: {name} is {weight.dtype}, expected one of {', '.join(map(str, FLOATS))}")
        view.copy_(weight)


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> Facts:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eot_text,
        "eos_token": tokenizer.eot_text,
        "model_max_length": config.block_size,
        "split_special_tokens": True,  # no text can produce eot
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def _as_json(content: Facts) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
