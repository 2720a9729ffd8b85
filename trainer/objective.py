"""What a step minimises, put together from the configuration: a loss with its correction and aggregation, KL and
entropy beside it; and what a critic minimises."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rollfarm.config import ConfigError
from rollfarm.registry import bind
from trainer.algorithms.advantages import ADVANTAGES, Advantage
from trainer.algorithms.aggregation import AGGREGATIONS, Aggregation
from trainer.algorithms.correction import CORRECTIONS, Correction, none
from trainer.algorithms.divergence import ESTIMATORS, Estimator, k3
from trainer.algorithms.losses import LOSSES, Loss, Metrics, Tokens, off_policy, supervised
from trainer.algorithms.measures import kl_by_lag, ratio_counts
from trainer.algorithms.values import value_loss
from trainer.config import Setting, TrainerConfig
from trainer.micro_batches import MicroBatch
from trainer.rows import Row

F = TypeVar("F", bound=Callable[..., Any])

LossFn = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Metrics]]
"""(f32[P] log-probabilities and entropies of the tokens in the mask, row by row; the micro-batch) to (the loss *summed*
over the micro-batch, metrics). Of a policy beside its reference, f32[2, P] are entropies and KLs to the reference."""


class Target(Protocol):
    """Something to minimise, with the way its tokens are counted."""

    def __call__(self, logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch, /) -> tuple[Tensor, Metrics]:
        """A LossFn."""
        ...

    def norm(self, rows: Sequence[Row]) -> float:
        """What the sum over all rows is divided by."""
        ...


@dataclass(frozen=True, slots=True)
class Objective:
    """What the policy minimises."""

    loss: Loss
    """Per token."""

    correction: Correction
    """What each token's loss is multiplied by, where samples are stale."""

    aggregation: Aggregation
    """Tokens to one number."""

    proximal_is_current: bool = True
    """Whether a batch is one optimiser step, so that the weights as the step began are the current ones."""

    kl: float = 0.0
    """Weight of the KL to the reference in a token's loss."""

    kl_estimator: Estimator | None = k3
    """Of that KL. None takes the KL that a policy beside its reference comes with."""

    entropy_bonus: float = 0.0
    """Weight of the entropy, which is subtracted from a token's loss."""

    def __call__(self, logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """The loss summed over the micro-batch, and metrics."""
        entropy_P, exact_kl_P = entropy_P.unbind() if entropy_P.dim() == 2 else (entropy_P, None)
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
        correction_P = self.correction(tokens)
        loss_P = loss_P * correction_P
        if self.correction is not none:
            metrics |= {"correction": correction_P.sum(), "correction_zero": (correction_P == 0).sum()}
        if self.kl:
            kl_P = self.kl_estimator(logp_P - batch.reference_logp_P) if self.kl_estimator else exact_kl_P
            assert kl_P is not None
            loss_P, metrics = loss_P + self.kl * kl_P, {**metrics, "kl_reference": kl_P.detach().sum()}
        if self.entropy_bonus:
            loss_P = loss_P - self.entropy_bonus * entropy_P
        weight_R, _ = self.aggregation(batch.policy_tokens_R)
        return (loss_P * weight_R[batch.row_P]).sum(), {**metrics, **_measured(tokens, entropy_P, batch)}

    def norm(self, rows: Sequence[Row]) -> float:
        return self.aggregation(torch.tensor([row.policy_tokens for row in rows]))[1]


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """What a critic minimises: the mean over all tokens."""

    clip: float
    """As value_loss has it."""

    def __call__(self, value_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        loss_P, metrics = value_loss(value_P, batch.old_value_P, batch.return_P, clip=self.clip)
        return loss_P.sum(), metrics

    def norm(self, rows: Sequence[Row]) -> float:
        return float(sum(row.policy_tokens for row in rows))


def policy_objective(config: TrainerConfig) -> Objective:
    """The objective of reinforcement learning. Raises ConfigError for an unknown name or setting."""
    correction = _bound("correction", CORRECTIONS, config.correction, config.correction_settings)
    return Objective(
        _bound("loss", LOSSES, config.loss, config.loss_settings),
        none if config.correction == "none" else correction,
        _bound("aggregation", AGGREGATIONS, config.aggregation, config.aggregation_settings),
        proximal_is_current=config.steps_per_batch == 1 and config.passes == 1,
        kl=config.kl.loss,
        kl_estimator=ESTIMATORS.get(config.kl.loss_estimator),
        entropy_bonus=config.entropy_bonus,
    )


def supervised_objective() -> Objective:
    """The warm start's: mean negative log-likelihood of a token."""
    return Objective(supervised, none, AGGREGATIONS["token_mean"])


def advantage_of(config: TrainerConfig) -> Advantage:
    """The configured advantage. Raises ConfigError for an unknown name or setting."""
    return _bound("advantage", ADVANTAGES, config.advantage, config.advantage_settings)


def _measured(tokens: Tokens, entropy_P: Tensor, batch: MicroBatch) -> Metrics:
    log_ratio_P = tokens.log_ratio_T("behavior")
    return {
        "entropy": entropy_P.detach().sum(),
        **off_policy(tokens),
        **ratio_counts(log_ratio_P),
        **kl_by_lag(log_ratio_P, batch.lag_P),
    }


def _bound(key: str, registry: Mapping[str, F], name: str, settings: Mapping[str, Setting]) -> F:
    try:
        return bind(registry, name, settings, what=key)
    except ConfigError as error:
        raise ConfigError(f"trainer.{key}: {error}") from None
