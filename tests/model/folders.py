"""Tiny models with random weights, their folders, and what they answer."""

import json
from pathlib import Path

import torch

from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import save_model
from quatrain.text.tokenizers import CharTokenizer, Tokenizer

TINY = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "vocab_size": 11, "vocab_multiple": 64}
LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
QWEN3 = LLAMA | {"qk_norm": True}
LETTERS = CharTokenizer("abcdefghij")  # 11 ids with eot


def random_model(**switches) -> GPT:
    """A model in which every weight, bias and norm differs from its initial value."""
    generator = torch.Generator().manual_seed(0)
    model = GPT(ModelConfig(**{**TINY, **switches}), generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for table in (model.transformer["wte"].weight, model.head_weight):
            table[model.config.vocab_size :] = 0
    return model


def saved(model: GPT, folder: Path, tokenizer: Tokenizer = LETTERS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return folder


def edited(tmp_path: Path, entries: dict, **switches) -> Path:
    """A saved folder with entries of its config.json replaced; None: taken out."""
    folder = saved(random_model(**switches), tmp_path / "edited")
    facts = read_json(folder / "config.json") | entries
    facts = {key: value for key, value in facts.items() if entries.get(key, value) is not None}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids)
    return output if isinstance(output, torch.Tensor) else output.logits


def read_json(path: Path):
    return json.loads(path.read_bytes())
