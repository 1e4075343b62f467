"""Learning rate and momentum as pure functions of the step s = 0, 1, ...: nothing to save, nothing to count."""

import math

from quatrain.training.config import OptimConfig

FIRST_MOMENTUM = 0.85  # of muon's warm-up (Jordan et al. 2024)


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """The rate of the update that turns step `step` into step + 1, in a run of `steps`."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "cosine":
        return _cosine(step, optim, steps)
    if optim.schedule == "wsd":
        return _stable_then_down(step, optim, steps)
    return optim.lr


def _cosine(step: int, optim: OptimConfig, steps: int) -> float:
    """Half a cosine from lr to min_lr (Loshchilov and Hutter 2017), and min_lr from `steps` on."""
    if step >= steps:
        return optim.min_lr
    progress = (step - optim.warmup) / (steps - optim.warmup)
    return optim.min_lr + (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def _stable_then_down(step: int, optim: OptimConfig, steps: int) -> float:
    """lr, then linearly to min_lr in the last `cooldown` steps (Hu et al. 2024, MiniCPM; Hägele et al. 2024)."""
    cooldown = optim.cooldown or max(1, steps // 5)
    left = min(1.0, max(0.0, (steps - step) / cooldown))
    return optim.min_lr + (optim.lr - optim.min_lr) * left


def momentum(step: int, optim: OptimConfig) -> float:
    """Muon's momentum, which rises linearly: at first the gradients change too fast to be averaged for long."""
    share = min(1.0, step / optim.momentum_warmup) if optim.momentum_warmup else 1.0
    first = min(FIRST_MOMENTUM, optim.momentum)
    return first + (optim.momentum - first) * share
