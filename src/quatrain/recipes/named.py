"""The recipes that come with quatrain, each a function with what to expect of it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from quatrain.model.config import ModelConfig
from quatrain.recipes.config import RunConfig
from quatrain.tokens.config import DataConfig
from quatrain.training.config import OptimConfig, TrainConfig

FINEWEB_EDU = (
    "quatrain prepare 'hub:HuggingFaceFW/fineweb-edu?name=sample-10BT&split=train' "
    "--tokenizer gpt2 --out stores/fineweb-edu"
)

SHAKESPEARE = "quatrain prepare tinyshakespeare.txt --tokenizer char --val-tail 0.1 --out stores/shakespeare"
SPEEDRUN_HEAD = (
    "GPT-2 124M's shape with a head of its own (162M weights in all), 10 billion tokens of FineWeb-Edu.\n"
    "By others' findings (modded-nanogpt, nanochat), not measured here at this size: muon, relu2, qk_norm, rope,\n"
    "rmsnorm, the untied head, zero_init, logit_softcap, value_residual, embedding_shortcut, linear cooldown.\n"
    "modded-nanogpt reports the loss of 10 billion tokens of plain GPT-2 (3.28) after 1.7 billion with such a mix.\n"
    "The rate is modded-nanogpt's 0.02 of muon for a 768 x 768 matrix in AdamW's measure, and its head's.\n"
    "Measured here: the mix at 0.8M parameters alone; see speedrun-cpu and bench/learn.py."
)
SPEEDRUN_CPU_HEAD = (
    "Is below shakespeare's loss of 2,000 steps (1.89 over the whole validation split) by step 264 of 288.\n"
    "The switches are others' findings, those of speedrun.\n"
    "Measured here with bench/learn.py: all of them together; lr and the length of the schedule were chosen here."
)


@dataclass(frozen=True)
class Recipe:
    """A named configuration, the command that prepares its data, and its head: one line a fact."""

    config: RunConfig
    prepare: str
    head: str


def sonnets() -> Recipe:
    """A character model of eight sonnets, in about a minute on two CPU cores."""
    return Recipe(
        RunConfig(
            model=ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64),
            optim=OptimConfig(lr=1e-3, schedule="constant", warmup=20, weight_decay=0.1),
            data=DataConfig(seq_len=64),
            train=TrainConfig(
                steps=1000,
                tokens_per_step=1024,
                micro_batch=8,
                eval_every=50,
                save_every=500,
                precision="fp32",  # at this size bf16 gains little, and the losses are the same on every CPU
                sample_prompt="",
            ),
        ),
        prepare="quatrain prepare corpus:sonnets --tokenizer char --val-docs 7 --out stores/sonnets",
        head="The demo's model. Starts near ln V and ends far below 1: seven sonnets are memorised, not learned.",
    )


def shakespeare() -> Recipe:
    """NanoGPT's CPU run on tinyshakespeare: 0.8M parameters, characters."""
    return Recipe(
        RunConfig(
            model=ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64),
            optim=OptimConfig(lr=1e-3, min_lr=1e-4, schedule="cosine", warmup=100, betas=(0.9, 0.99)),
            data=DataConfig(seq_len=64),
            train=TrainConfig(
                steps=2000,
                tokens_per_step=12 * 64,
                micro_batch=12,
                eval_every=250,
                save_every=500,
                precision="fp32",
                sample_prompt="",
            ),
        ),
        prepare=SHAKESPEARE,
        head="The plain recipe of the field ends near a validation loss of 1.91 after these 2,000 steps.",
    )


def speedrun_cpu() -> Recipe:
    """The same size as shakespeare and far fewer tokens to its loss: Muon, RoPE and the speed runs' switches."""
    return Recipe(
        RunConfig(
            model=_speedrun_model(ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64)),
            optim=_muon(lr=5e-3, warmup=10, cooldown=278, momentum_warmup=50),
            data=DataConfig(seq_len=64),
            train=TrainConfig(
                steps=288,
                tokens_per_step=12 * 64,
                micro_batch=12,
                eval_every=48,
                save_every=144,
                precision="fp32",
                sample_prompt="",
            ),
        ),
        prepare=SHAKESPEARE,
        head=SPEEDRUN_CPU_HEAD,
    )


def gpt2() -> Recipe:
    """GPT-2 124M on 10 billion tokens."""
    return _gpt2_like("GPT-2 124M", ModelConfig(), lr=6e-4, min_lr=6e-5)


def gpt2_medium() -> Recipe:
    """GPT-2 355M on 10 billion tokens."""
    return _gpt2_like(
        "GPT-2 medium (355M)", ModelConfig(n_layer=24, n_head=16, n_embd=1024), lr=3e-4, min_lr=3e-5, micro_batch=8
    )


def gpt2_large() -> Recipe:
    """GPT-2 774M on 10 billion tokens."""
    return _gpt2_like(
        "GPT-2 large (774M)", ModelConfig(n_layer=36, n_head=20, n_embd=1280), lr=2.5e-4, min_lr=2.5e-5, micro_batch=4
    )


def gpt2_xl() -> Recipe:
    """GPT-2 1.56B on 10 billion tokens."""
    return _gpt2_like(
        "GPT-2 XL (1.56B)", ModelConfig(n_layer=48, n_head=25, n_embd=1600), lr=2e-4, min_lr=2e-5, micro_batch=4
    )


def gpt2_rope_swiglu() -> Recipe:
    """124M with rotary positions, RMSNorm and SwiGLU, at a higher learning rate."""
    return Recipe(
        RunConfig(
            model=ModelConfig(position="rope", norm="rmsnorm", mlp="swiglu", bias=False),
            optim=OptimConfig(lr=1.5e-3, min_lr=1.5e-4, schedule="cosine", warmup=300),
            data=DataConfig(seq_len=1024, order="shuffle", seed=1337),
            train=TrainConfig(steps=19_073, micro_batch=64, eval_every=250, save_every=1000, seed=42),
        ),
        prepare=FINEWEB_EDU,
        head=(
            "10 billion tokens of FineWeb-Edu; global shuffle.\n"
            "Others reached with it on one H100: validation loss 2.99, HellaSwag 31.71 %, about 7 h, 430,000 tokens/s."
        ),
    )


def speedrun() -> Recipe:
    """124M by the mix that others' speed runs settled on: Muon, RoPE, RMSNorm, relu2, qk_norm and shortcuts."""
    return Recipe(
        RunConfig(
            model=_speedrun_model(ModelConfig()),
            optim=_muon(lr=3.6e-3, warmup=0, cooldown=7_629, momentum_warmup=300),
            data=DataConfig(seq_len=1024),
            train=TrainConfig(steps=19_073, micro_batch=32, eval_every=250, save_every=1000),
        ),
        prepare=FINEWEB_EDU,
        head=SPEEDRUN_HEAD,
    )


def _speedrun_model(shape: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        shape,
        position="rope",
        norm="rmsnorm",
        mlp="relu2",
        bias=False,
        qk_norm=True,
        tied=False,
        zero_init=True,
        logit_softcap=15.0,
        value_residual=True,
        embedding_shortcut=True,
    )


def _muon(lr: float, warmup: int, cooldown: int, momentum_warmup: int) -> OptimConfig:
    return OptimConfig(
        kind="muon", lr=lr, schedule="wsd", warmup=warmup, cooldown=cooldown, momentum_warmup=momentum_warmup
    )


def _gpt2_like(name: str, model: ModelConfig, lr: float, min_lr: float, micro_batch: int = 16) -> Recipe:
    return Recipe(
        RunConfig(
            model=model,
            optim=OptimConfig(lr=lr, min_lr=min_lr, schedule="cosine", warmup=715),
            data=DataConfig(seq_len=1024),
            train=TrainConfig(steps=19_073, micro_batch=micro_batch, eval_every=250, save_every=1000),
        ),
        prepare=FINEWEB_EDU,
        head=f"{name} as published, on 10 billion tokens of FineWeb-Edu: 19,073 steps of 524,288.",
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "sonnets": sonnets,
    "shakespeare": shakespeare,
    "speedrun-cpu": speedrun_cpu,
    "gpt2": gpt2,
    "speedrun": speedrun,
    "gpt2-rope-swiglu": gpt2_rope_swiglu,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "gpt2-xl": gpt2_xl,
}
