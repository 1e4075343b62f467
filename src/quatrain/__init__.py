"""quatrain: pretrain GPT-2-class language models from raw text. Four verbs: prepare, train, evaluate, sample."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quatrain.inference.sampling import generate
    from quatrain.inference.scoring import evaluate
    from quatrain.model.config import ModelConfig
    from quatrain.model.gpt import GPT
    from quatrain.text.tokenizers import build_tokenizer
    from quatrain.tokens.loader import Loader
    from quatrain.tokens.packing import packed_mask, padding_waste
    from quatrain.tokens.store import TokenStore
    from quatrain.tokens.windows import coverage, sample_batch, sequential_batches
    from quatrain.tokens.writer import prepare
    from quatrain.training.loop import Trainer, train

__version__ = "0.1.0"

# Resolved when asked for, so that importing quatrain never imports torch by itself.
_HOMES = {
    "GPT": "model.gpt",
    "ModelConfig": "model.config",
    "TokenStore": "tokens.store",
    "Loader": "tokens.loader",
    "Trainer": "training.loop",
    "prepare": "tokens.writer",
    "train": "training.loop",
    "evaluate": "inference.scoring",
    "generate": "inference.sampling",
    "build_tokenizer": "text.tokenizers",
    "sample_batch": "tokens.windows",
    "sequential_batches": "tokens.windows",
    "packed_mask": "tokens.packing",
    "coverage": "tokens.windows",
    "padding_waste": "tokens.packing",
}

__all__ = [
    "GPT",
    "Loader",
    "ModelConfig",
    "TokenStore",
    "Trainer",
    "build_tokenizer",
    "coverage",
    "evaluate",
    "generate",
    "packed_mask",
    "padding_waste",
    "prepare",
    "sample_batch",
    "sequential_batches",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quatrain' has no attribute '{name}'")
    return getattr(import_module(f"quatrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
