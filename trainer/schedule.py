"""The learning rate over a run."""

import math

from trainer.config import TrainerConfig


def lr_share(config: TrainerConfig, step: int, total: int) -> float:
    """The learning rate of a step, from 0, as a share of its peak; `total` is the run's steps, 0 without end."""
    warmth = min(1.0, (step + 1) / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
    done = min(1.0, step / total) if total else 0.0
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return warmth * shape[config.lr_schedule]
