"""What a step minimises: an advantage, a loss, a correction and an aggregation, put together from the configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollfarm.config import ConfigError
from rollfarm.registry import bind
from trainer.algorithms.advantages import ADVANTAGES, Advantage
from trainer.algorithms.aggregation import AGGREGATIONS, Aggregation
from trainer.algorithms.correction import CORRECTIONS, Correction, none
from trainer.algorithms.losses import LOSSES, Loss, Metrics, Tokens, off_policy, supervised
from trainer.config import Setting, TrainerConfig
from trainer.micro_batches import MicroBatch
from trainer.rows import Row

F = TypeVar("F", bound=Callable[..., Any])

LossFn = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Metrics]]
"""(f32[P] log-probabilities and entropies of the tokens in the mask, row by row; the micro-batch) to (the loss *summed*
over the micro-batch, metrics)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss with the way its tokens are counted."""

    loss: Loss
    """Per token."""

    correction: Correction
    """What each token's loss is multiplied by, where samples are stale."""

    aggregation: Aggregation
    """Tokens to one number."""

    proximal_is_current: bool = True
    """Whether a batch is one optimiser step, so that the weights as the step began are the current ones."""

    def __call__(self, logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """The loss summed over the micro-batch, and metrics; a LossFn."""
        tokens = Tokens(
            logp_P,
            batch.behavior_logp_P,
            logp_P.detach() if self.proximal_is_current else batch.proximal_logp_P,
            batch.advantage_P,
            batch.row_P,
            batch.action_P,
            batch.rows,
        )
        loss_P, metrics = self.loss(tokens)
        weight_R, _ = self.aggregation(batch.policy_tokens_R)
        weight_P = self.correction(tokens) * weight_R[batch.row_P]
        return (loss_P * weight_P).sum(), {"entropy": entropy_P.sum(), **off_policy(tokens), **metrics}

    def norm(self, rows: Sequence[Row]) -> float:
        """What the sum over all rows is divided by."""
        return self.aggregation(torch.tensor([row.policy_tokens for row in rows]))[1]


def policy_objective(config: TrainerConfig) -> Objective:
    """The objective of reinforcement learning. Raises ConfigError for an unknown name or setting."""
    return Objective(
        _bound("loss", LOSSES, config.loss, config.loss_settings),
        _bound("correction", CORRECTIONS, config.correction, config.correction_settings),
        _bound("aggregation", AGGREGATIONS, config.aggregation, config.aggregation_settings),
        proximal_is_current=config.steps_per_batch == 1 and config.passes == 1,
    )


def supervised_objective() -> Objective:
    """The warm start's: mean negative log-likelihood of a token."""
    return Objective(supervised, none, AGGREGATIONS["token_mean"])


def advantage_of(config: TrainerConfig) -> Advantage:
    """The configured advantage. Raises ConfigError for an unknown name or setting."""
    return _bound("advantage", ADVANTAGES, config.advantage, config.advantage_settings)


def _bound(key: str, registry: Mapping[str, F], name: str, settings: Mapping[str, Setting]) -> F:
    try:
        return bind(registry, name, settings, what=key)
    except ConfigError as error:
        raise ConfigError(f"trainer.{key}: {error}") from None
