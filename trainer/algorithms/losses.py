"""Log-probabilities to a loss for each token, against the policy that sampled it.

Every function takes the same four tensors of one shape and answers with the loss of each token and what it measured;
aggregation.py weighs and sums the tokens. Correction for stale samples is on in each: the ratio is always to the
*behaviour* policy, as recorded when the token was sampled.

Metrics are sums over the mask, which the caller divides by the global token count, except names that end in "_max",
of which the caller takes the greatest.

Legend: T any shape of tokens, for instance [rows, positions].
"""

from typing import Protocol

import torch
from torch import Tensor

Metrics = dict[str, Tensor]


class Loss(Protocol):
    def __call__(
        self, logp_T: Tensor, behavior_logp_T: Tensor, advantage_T: Tensor, mask_T: Tensor, /
    ) -> tuple[Tensor, Metrics]:
        """The loss of each token, 0 outside the mask, and metrics.

        logp_T           f32  log pi of the sampled token under the current weights, nats, has grad; pi is the policy at
                              the temperature of the samples
        behavior_logp_T  f32  the same, recorded by the engine when the token was sampled
        advantage_T      f32  unitless, constant across a trajectory
        mask_T           bool true on tokens that the policy wrote
        """
        ...


def clipped(
    logp_T: Tensor,
    behavior_logp_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, with DAPO's two bounds.

    A token whose ratio left [1 - clip_low, 1 + clip_high] in the direction that its advantage asks for has no gradient.
    `dual_clip` bounds the loss of a token with negative advantage at dual_clip * |advantage|, however likely the
    current weights find it; 0 leaves it unbounded.
    """
    ratio_T = _ratio(logp_T, behavior_logp_T, mask_T)
    bounded_T = torch.clamp(ratio_T, 1 - clip_low, 1 + clip_high)
    objective_T = torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)
    if dual_clip:
        floor_T = torch.where(advantage_T < 0, dual_clip * advantage_T, -torch.inf)
        objective_T = torch.maximum(objective_T, floor_T)
    moved_T = (objective_T != ratio_T * advantage_T) & mask_T
    return torch.where(mask_T, -objective_T, 0.0), {
        **_off_policy(logp_T, behavior_logp_T, mask_T),
        "clipped": moved_T.sum(),
    }


def truncated(
    logp_T: Tensor,
    behavior_logp_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    *,
    weight_low: float = 0.0,
    weight_high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """The policy gradient with an importance weight cut to [weight_low, weight_high] (TIS; CISPO with both bounds).

    Every token keeps a gradient. At high learning rates this alone is less stable than `clipped`.
    """
    ratio_T = _ratio(logp_T, behavior_logp_T, mask_T).detach()
    weight_T = ratio_T.clamp(weight_low, weight_high)
    return torch.where(mask_T, -weight_T * advantage_T * logp_T, 0.0), {
        **_off_policy(logp_T, behavior_logp_T, mask_T),
        "clipped": ((weight_T != ratio_T) & mask_T).sum(),
    }


def reinforce(
    logp_T: Tensor, behavior_logp_T: Tensor, advantage_T: Tensor, mask_T: Tensor, *, correct: bool = True
) -> tuple[Tensor, Metrics]:
    """The plain policy gradient, importance-weighted without bounds.

    Without `correct` a stale sample counts like a fresh one: for comparison alone.
    """
    weight_T = _ratio(logp_T, behavior_logp_T, mask_T).detach() if correct else torch.ones_like(logp_T)
    return torch.where(mask_T, -weight_T * advantage_T * logp_T, 0.0), _off_policy(logp_T, behavior_logp_T, mask_T)


def supervised(logp_T: Tensor, behavior_logp_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the tokens in the mask; the other arguments are not used."""
    del behavior_logp_T, advantage_T
    return torch.where(mask_T, -logp_T, 0.0), {}


def _ratio(logp_T: Tensor, behavior_logp_T: Tensor, mask_T: Tensor) -> Tensor:
    """pi / behaviour, 1 outside the mask, where neither log-probability means anything."""
    return torch.exp(torch.where(mask_T, logp_T - behavior_logp_T, 0.0))


def _off_policy(logp_T: Tensor, behavior_logp_T: Tensor, mask_T: Tensor) -> Metrics:
    """How far the current weights are from the behaviour policy."""
    log_ratio_T = torch.where(mask_T, logp_T - behavior_logp_T, 0.0).detach()
    ratio_T = torch.exp(log_ratio_T)
    return {
        "ratio": torch.where(mask_T, ratio_T, 0.0).sum(),
        "ratio_max": torch.where(mask_T, ratio_T, 0.0).amax(),
        "kl_behavior": torch.where(mask_T, ratio_T - 1 - log_ratio_T, 0.0).sum(),
        "behavior_gap_max": log_ratio_T.abs().amax(),
    }


LOSSES: dict[str, Loss] = {
    "clipped": clipped,
    "truncated": truncated,
    "reinforce": reinforce,
}
