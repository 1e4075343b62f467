"""A run of seconds, of which a page has something to show."""

from pathlib import Path

from quatrain.model.config import ModelConfig
from quatrain.recipes.config import RunConfig
from quatrain.recipes.resolve import to_toml
from quatrain.tokens.config import DataConfig
from quatrain.tokens.store import TokenStore
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.loop import train

STEPS = 30


def tiny_run(store: TokenStore, run: Path, seed: int = 42) -> Path:
    """30 steps, with a validation, two samples and a checkpoint every ten."""
    model = ModelConfig(n_layer=1, n_head=2, n_embd=32, block_size=64, vocab_size=store.vocab_size)
    data = DataConfig(store=str(store.folder), seq_len=64)
    config = TrainConfig(
        steps=STEPS,
        tokens_per_step=256,
        micro_batch=4,
        eval_every=10,
        save_every=10,
        keep_last=5,
        precision="fp32",
        seed=seed,
        samples=2,
        sample_tokens=24,
    )
    optim = OptimConfig(lr=3e-3, min_lr=3e-4, warmup=5)
    recipe = to_toml(RunConfig(model=model, optim=optim, data=data, train=config))
    train(model, optim, data, config, run, recipe, "cpu")
    return run
