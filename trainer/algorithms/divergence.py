"""How far a policy is from another model.

An estimator takes log r = log policy - log reference of a token that the policy sampled; its mean over such tokens is
KL(policy || reference), or a measure like it. A comparison takes both models' probabilities of every word where a token
stands, and sums over the vocabulary.

Legend: P tokens, V words.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Estimator = Callable[[Tensor], Tensor]
"""f[P] log r, nats, to f[P], nats."""

Comparison = Callable[[Tensor, Tensor], Tensor]
"""f[P, V] log policy and f[P, V] log other, nats, finite, to f[..., P], nats."""


def k1(log_ratio_P: Tensor) -> Tensor:
    """log r: unbiased, and of either sign (Schulman, http://joschu.net/blog/kl-approx.html). As a loss its gradient is
    0 on average (arXiv 2510.01555)."""
    return log_ratio_P


def k2(log_ratio_P: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, and never negative (the same). As a loss its gradient is the KL's."""
    return log_ratio_P.square() / 2


def k3(log_ratio_P: Tensor) -> Tensor:
    """1 / r - 1 + log r: unbiased, and never negative (the same; GRPO, arXiv 2402.03300, eq. 4)."""
    return (-log_ratio_P).exp() - 1 + log_ratio_P


def absolute(log_ratio_P: Tensor) -> Tensor:
    """|log r|: a distance of its own, robust to outliers."""
    return log_ratio_P.abs()


def entropy_and_kl(lp_PV: Tensor, lq_PV: Tensor) -> Tensor:
    """f[2, P], the policy's entropy and KL(policy || other)."""
    p_PV = lp_PV.exp()
    return torch.stack([-(p_PV * lp_PV).sum(-1), (p_PV * (lp_PV - lq_PV)).sum(-1)])


def kl_of_teacher(lp_PV: Tensor, lq_PV: Tensor) -> Tensor:
    """f[P], KL(other || policy): least where the policy is the other (Hinton et al. 2015)."""
    return (lq_PV.exp() * (lq_PV - lp_PV)).sum(-1)


def steered(coefficient: float, found: float, target: float, gain: float) -> float:
    """The coefficient of a KL penalty for the next step, which holds the KL `found` at `target`, both in nats:
    b (1 + gain e), e = clip(found / target - 1, -0.2, 0.2) (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""
    error = min(max(found / target - 1, -0.2), 0.2)
    return coefficient * (1 + gain * error)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
