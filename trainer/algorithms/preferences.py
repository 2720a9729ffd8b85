"""Learning from pairs of answers, one of which is preferred.

Legend: K pairs; 2 sides, the chosen answer and the rejected one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True, slots=True, eq=False)
class Preferences:
    """What pairs are worth to the current policy."""

    loss_K: Tensor
    """f64, -log sigmoid(margin), nats."""

    margin_K: Tensor
    """f64, how much more the policy prefers the chosen answer than the reference does, times beta. Above 0 is right."""

    advantage_K2: Tensor
    """f64, minus the derivative of the loss by the log-probability of each answer: what the policy gradient of its
    tokens is multiplied by."""


def dpo(logp_K2: Tensor, reference_logp_K2: Tensor, *, beta: float) -> Preferences:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290).

    loss = -log sigmoid(m) with m = beta ((logp - reference)[chosen] - (logp - reference)[rejected]), so its derivative
    is -beta sigmoid(-m) by logp[chosen] and beta sigmoid(-m) by logp[rejected].

    logp_K2            f64, log-probability of each whole answer under the current policy, nats
    reference_logp_K2  f64, the same under the reference
    """
    gap_K2 = logp_K2 - reference_logp_K2
    margin_K = beta * (gap_K2[:, 0] - gap_K2[:, 1])
    push_K = beta * torch.sigmoid(-margin_K)
    return Preferences(softplus(-margin_K), margin_K, torch.stack([push_K, -push_K], dim=1))
