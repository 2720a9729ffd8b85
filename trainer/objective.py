"""What a step minimises: an advantage, a loss and an aggregation, put together from the configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollfarm.config import ConfigError
from rollfarm.registry import bind
from trainer.algorithms.advantages import ADVANTAGES, Advantage
from trainer.algorithms.aggregation import AGGREGATIONS, Aggregation
from trainer.algorithms.losses import LOSSES, Loss, Metrics, supervised
from trainer.config import Setting, TrainerConfig
from trainer.rows import MicroBatch, Row

F = TypeVar("F", bound=Callable[..., Any])

LossFn = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Metrics]]
"""(log-probabilities, entropies, micro-batch) to (the loss *summed* over the micro-batch, metrics)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss with the way its tokens are counted."""

    loss: Loss
    """Per token."""

    aggregation: Aggregation
    """Tokens to one number."""

    def __call__(self, logp_RT: Tensor, entropy_RT: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """The loss summed over the micro-batch, and metrics; a LossFn."""
        per_token_RT, metrics = self.loss(logp_RT, batch.behavior_logp_RT, batch.advantage_RT, batch.mask_RT)
        weights_RT, _ = self.aggregation(batch.mask_RT)
        entropy = torch.where(batch.mask_RT, entropy_RT, 0.0).sum()
        return (per_token_RT * weights_RT).sum(), {"entropy": entropy, **metrics}

    def norm(self, rows: Sequence[Row]) -> float:
        """What the sum over all rows is divided by."""
        return sum(self.aggregation(torch.from_numpy(row.mask_T)[None])[1] for row in rows)


def policy_objective(config: TrainerConfig) -> Objective:
    """The objective of reinforcement learning. Raises ConfigError for an unknown name or setting."""
    return Objective(
        _bound("loss", LOSSES, config.loss, config.loss_settings),
        _bound("aggregation", AGGREGATIONS, config.aggregation, config.aggregation_settings),
    )


def supervised_objective() -> Objective:
    """The warm start's: mean negative log-likelihood of a token."""
    return Objective(supervised, AGGREGATIONS["token_mean"])


def advantage_of(config: TrainerConfig) -> Advantage:
    """The configured advantage. Raises ConfigError for an unknown name or setting."""
    return _bound("advantage", ADVANTAGES, config.advantage, config.advantage_settings)


def _bound(key: str, registry: Mapping[str, F], name: str, settings: Mapping[str, Setting]) -> F:
    try:
        return bind(registry, name, settings, what=key)
    except ConfigError as error:
        raise ConfigError(f"trainer.{key}: {error}") from None
