"""Weights for samples of an older policy, where a loss's ratio is to the proximal one: proximal to behaviour.

Each gives every token a weight without gradient, which the loss is multiplied by. In formulas, w is the ratio of the
token, or of its sequence, as `level` says.

Legend: T tokens.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.algorithms.losses import Tokens
from trainer.algorithms.samples import mean_by, sum_by

Level = Literal["token", "sequence", "geometric"]
"""One weight for each token; one for each sequence, the product of its tokens'; or their geometric mean."""


class Correction(Protocol):
    def __call__(self, tokens: Tokens, /) -> Tensor:
        """f32[T], at least 0."""
        ...


def truncated(tokens: Tokens, *, level: Level = "token", low: float = 0.0, high: float = 2.0) -> Tensor:
    """clip(w, low, high) (TIS). Beside a loss that is clipped to the proximal policy it makes decoupled PPO (arXiv
    2110.00641; AReaL, arXiv 2505.24298)."""
    return _weight_T(tokens, level).clamp(low, high)


def masked(tokens: Tokens, *, level: Level = "token", low: float = 0.5, high: float = 5.0) -> Tensor:
    """w where it lies in [low, high], and 0 elsewhere: what is too far off teaches nothing (IcePop, Ring-1T, arXiv
    2510.18855)."""
    weight_T = _weight_T(tokens, level)
    return torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0)


def none(tokens: Tokens) -> Tensor:
    """1: stale samples count like fresh ones. For comparison, or where the loss's own ratio corrects."""
    return torch.ones_like(tokens.behavior_logp_T)


def _weight_T(tokens: Tokens, level: Level) -> Tensor:
    log_weight_T = tokens.proximal_logp_T - tokens.behavior_logp_T
    if level != "token" and len(log_weight_T):
        over = sum_by if level == "sequence" else mean_by
        log_weight_T = over(log_weight_T, tokens.sequence_T, tokens.sequences)[tokens.sequence_T]
    return torch.exp(log_weight_T).detach()


CORRECTIONS: dict[str, Correction] = {"truncated": truncated, "masked": masked, "none": none}
