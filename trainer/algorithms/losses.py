"""Log-probabilities to a loss for each token that the policy wrote.

Three policies are told apart: *behaviour* sampled the token, *proximal* is the policy as it was when the step began,
and *current* is what learns. A ratio r is current to `anchor`. To the behaviour policy (the default) it corrects for
stale samples by itself, and its clip bounds the correction too; to the proximal policy it needs one of correction.py
beside it, which the objective multiplies in.

In formulas, A is the advantage, sg stops the gradient, and clip(x, a, b) bounds x to [a, b].

Metrics are sums over the tokens, which the caller divides by the global token count, except names that end in "_max",
of which the caller takes the greatest.

Legend: T tokens, S sequences, A actions.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.algorithms.samples import mean_by

Metrics = dict[str, Tensor]

Anchor = Literal["behavior", "proximal"]
"""What a ratio is to."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a micro-batch that the policy wrote, end to end; of no others is there anything to get wrong."""

    logp_T: Tensor
    """f32, log-probability under the current weights, nats, has grad; at the temperature of the samples."""

    behavior_logp_T: Tensor
    """f32, the same under the policy that sampled the token, recorded by the engine then."""

    proximal_logp_T: Tensor
    """f32, the same under the weights as the step began."""

    advantage_T: Tensor
    """f32, unitless."""

    sequence_T: Tensor
    """i64, the row of each token, ascending from 0; rows in which the policy wrote nothing have a number too."""

    action_T: Tensor
    """i64, the action of each token, ascending from 0."""

    sequences: int
    """S."""

    def log_ratio_T(self, anchor: Anchor) -> Tensor:
        """f32, log of current to `anchor`."""
        return self.logp_T - (self.behavior_logp_T if anchor == "behavior" else self.proximal_logp_T)


class Loss(Protocol):
    def __call__(self, tokens: Tokens, /) -> tuple[Tensor, Metrics]:
        """f32[T] the loss of each token, and metrics."""
        ...


def clipped(
    tokens: Tokens,
    *,
    anchor: Anchor = "behavior",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO's surrogate (arXiv 1707.06347) with DAPO's two bounds
    (arXiv 2503.14476).

    A token whose ratio left the bounds in the direction that its advantage asks for has no gradient. `dual_clip` bounds
    the loss of a token with A < 0 at dual_clip |A|, however likely the current weights find it (arXiv 1912.09729); 0
    leaves it unbounded.
    """
    return _surrogate(torch.exp(tokens.log_ratio_T(anchor)), tokens.advantage_T, clip_low, clip_high, dual_clip)


def gspo(
    tokens: Tokens,
    *,
    anchor: Anchor = "behavior",
    per: Literal["sequence", "action"] = "sequence",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    """PPO's surrogate with one ratio for a whole sequence, the geometric mean of its tokens', whose gradient is shared
    out to the tokens: sg(mean ratio) r / sg(r) (GSPO-token, arXiv 2507.18071).

    With `per` "action" it is one for each action, for episodes of many turns.
    """
    log_ratio_T = tokens.log_ratio_T(anchor)
    index_T = tokens.sequence_T if per == "sequence" else tokens.action_T
    mean_T = _mean_T(log_ratio_T, index_T)
    # The value is the mean's, the gradient each token's own.
    ratio_T = torch.exp(mean_T.detach() + log_ratio_T - log_ratio_T.detach())
    return _surrogate(ratio_T, tokens.advantage_T, clip_low, clip_high, 0.0)


def gmpo(
    tokens: Tokens, *, anchor: Anchor = "behavior", clip_low: float = 0.4, clip_high: float = 0.4
) -> tuple[Tensor, Metrics]:
    """-A times the geometric mean of a sequence's ratios, each log-ratio bounded by clip_high where A > 0 and by
    -clip_low where A < 0 (GMPO, arXiv 2507.20673)."""
    log_ratio_T = tokens.log_ratio_T(anchor)
    bounded_T = log_ratio_T.clamp(-clip_low, clip_high)
    kept_T = torch.where(
        tokens.advantage_T > 0, torch.minimum(log_ratio_T, bounded_T), torch.maximum(log_ratio_T, bounded_T)
    )
    ratio_T = torch.exp(_mean_T(kept_T, tokens.sequence_T))
    return -ratio_T * tokens.advantage_T, {"clipped": (kept_T != log_ratio_T).sum()}


def truncated(
    tokens: Tokens, *, anchor: Anchor = "behavior", weight_low: float = 0.0, weight_high: float = 2.0
) -> tuple[Tensor, Metrics]:
    """-sg(clip(r, weight_low, weight_high)) A log pi: the policy gradient, its importance weight truncated (TIS, from
    V-trace, arXiv 1802.01561).

    Every token keeps a gradient. At high learning rates this alone is less stable than `clipped`.
    """
    return _weighted(tokens, anchor, weight_low, weight_high)


def cispo(
    tokens: Tokens, *, anchor: Anchor = "behavior", clip_low: float = 1.0, clip_high: float = 2.0
) -> tuple[Tensor, Metrics]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585); with clip_low 1 there
    is no lower bound."""
    return _weighted(tokens, anchor, 1 - clip_low, 1 + clip_high)


def topr(
    tokens: Tokens, *, anchor: Anchor = "behavior", weight_low: float = 0.0, weight_high: float = 1.0
) -> tuple[Tensor, Metrics]:
    """-A log pi where A >= 0, -sg(clip(r, weight_low, weight_high)) A log pi where A < 0 (TOPR, arXiv 2503.14286, here
    token by token)."""
    ratio_T = torch.exp(tokens.log_ratio_T(anchor)).detach()
    weight_T = torch.where(tokens.advantage_T < 0, ratio_T.clamp(weight_low, weight_high), 1.0)
    cut_T = (tokens.advantage_T < 0) & (weight_T != ratio_T)
    return -weight_T * tokens.advantage_T * tokens.logp_T, {"clipped": cut_T.sum()}


def kimi(tokens: Tokens, *, anchor: Anchor = "behavior", tau: float = 0.1) -> tuple[Tensor, Metrics]:
    """-A log pi + tau / 2 (log r)^2: the square holds the policy near its anchor in place of a clip (Kimi k1.5, arXiv
    2501.12599, here token by token)."""
    square_T = tokens.log_ratio_T(anchor).square()
    return -tokens.advantage_T * tokens.logp_T + tau / 2 * square_T, {}


def reinforce(tokens: Tokens, *, correct: bool = True) -> tuple[Tensor, Metrics]:
    """-sg(r) A log pi: the plain policy gradient (Williams 1992), importance-weighted without bounds.

    Without `correct` a stale sample counts like a fresh one: for comparison alone, or with a correction beside it.
    """
    if correct:
        return _weighted(tokens, "behavior", 0.0, torch.inf)
    return -tokens.advantage_T * tokens.logp_T, {}


def supervised(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the tokens."""
    return -tokens.logp_T, {}


def _surrogate(
    ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Metrics]:
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    objective_T = torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)
    if dual_clip:
        floor_T = torch.where(advantage_T < 0, dual_clip * advantage_T, -torch.inf)
        objective_T = torch.maximum(objective_T, floor_T)
    return -objective_T, {"clipped": (objective_T != ratio_T * advantage_T).sum()}


def _weighted(tokens: Tokens, anchor: Anchor, low: float, high: float) -> tuple[Tensor, Metrics]:
    ratio_T = torch.exp(tokens.log_ratio_T(anchor)).detach()
    weight_T = ratio_T.clamp(low, high)
    return -weight_T * tokens.advantage_T * tokens.logp_T, {"clipped": (weight_T != ratio_T).sum()}


def _mean_T(values_T: Tensor, index_T: Tensor) -> Tensor:
    """The mean of each token's class."""
    if not len(index_T):
        return values_T
    return mean_by(values_T, index_T, int(index_T.max()) + 1)[index_T]


def off_policy(tokens: Tokens) -> Metrics:
    """How far the current weights are from the policy that sampled."""
    log_ratio_T = (tokens.logp_T - tokens.behavior_logp_T).detach()
    ratio_T = torch.exp(log_ratio_T)
    return {
        "ratio": ratio_T.sum(),
        "ratio_square": ratio_T.square().sum(),
        "ratio_max": ratio_T.amax() if len(ratio_T) else ratio_T.sum(),
        "kl_behavior": (ratio_T - 1 - log_ratio_T).sum(),
        "behavior_gap_max": log_ratio_T.abs().amax() if len(ratio_T) else ratio_T.sum(),
    }


LOSSES: dict[str, Loss] = {
    "clipped": clipped,
    "gspo": gspo,
    "gmpo": gmpo,
    "truncated": truncated,
    "cispo": cispo,
    "topr": topr,
    "kimi": kimi,
    "reinforce": reinforce,
}
