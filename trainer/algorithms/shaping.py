"""Rewards and advantages, bent: penalties, normalisation, bounds, and what is left out.

Legend: N trajectories, P tokens of the policy.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.samples import STD_FLOOR, centered_by, mean_by, std_by


@dataclass(frozen=True, slots=True)
class Moments:
    """Of all values until now. The default is of none."""

    count: int = 0
    """Values seen."""

    mean: float = 0.0
    """Of them."""

    square: float = 0.0
    """Sum of their squared distances from the mean."""

    def with_more(self, values: Tensor) -> "Moments":
        """These and f64[N] more (Chan et al. 1979)."""
        if not len(values):
            return self
        more, mean = len(values), float(values.mean())
        count, apart = self.count + more, mean - self.mean
        square = float((values - mean).square().sum()) + apart**2 * self.count * more / count
        return Moments(count, self.mean + apart * more / count, self.square + square)

    @property
    def std(self) -> float:
        """The standard deviation (over n, not n - 1)."""
        return (self.square / self.count) ** 0.5 if self.count else 0.0


def overlong(tokens_N: Tensor, *, limit: int, buffer: int, penalty: float) -> Tensor:
    """f64[N], at most 0: 0 up to limit - buffer tokens, then falling linearly to -penalty at `limit` (DAPO, arXiv
    2503.14476, eq. 13, with penalty 1)."""
    over_N = tokens_N.double() - (limit - buffer)
    share_N = over_N / buffer if buffer else (over_N > 0).double()
    return -penalty * share_N.clamp(0, 1)


def standardized(
    reward_N: Tensor, group_N: Tensor, over: Literal["none", "group", "batch", "running"], until_now: Moments
) -> tuple[Tensor, Tensor]:
    """f64[N] rewards minus a mean in units of a deviation, and f64[N] what each was multiplied by.

    `until_now` are the moments of the run's rewards, these included. A deviation of at most STD_FLOOR multiplies by 0.
    """
    if over == "none":
        return reward_N, torch.ones_like(reward_N)
    if over == "running":
        moved_N, deviation_N = reward_N - until_now.mean, torch.full_like(reward_N, until_now.std)
    else:
        index_N = group_N if over == "group" else torch.zeros_like(group_N)
        moved_N, deviation_N = centered_by(reward_N, index_N), std_by(reward_N, index_N)
    factor_N = torch.where(deviation_N > STD_FLOOR, 1 / deviation_N.clamp(min=STD_FLOOR), 0.0)
    return moved_N * factor_N, factor_N


def whitened(advantage_P: Tensor) -> Tensor:
    """Minus the mean of all tokens, in units of their deviation. Advantages that agree become 0."""
    everything_P = torch.zeros(len(advantage_P), dtype=torch.int64)
    deviation_P = std_by(advantage_P, everything_P)
    moved_P = centered_by(advantage_P, everything_P)
    return torch.where(deviation_P > STD_FLOOR, moved_P / deviation_P.clamp(min=STD_FLOOR), 0.0)


def bounded(values: Tensor, bound: float) -> Tensor:
    """Between -bound and bound; 0 has no bound."""
    return values.clamp(-bound, bound) if bound else values


def length_weights(tokens_N: Tensor, power: float) -> Tensor:
    """f64[N], (mean tokens of a trajectory / its own) ^ power. 1 where it has none."""
    lengths_N = tokens_N.clamp(min=1).double()
    return (lengths_N.mean() / lengths_N) ** power


def of_fit_difficulty(reward_N: Tensor, group_N: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool[N], whether the mean reward of the trajectory's group lies strictly between `low` and `high` (a difficulty
    mask). None is without bound."""
    if not len(reward_N):
        return torch.zeros(0, dtype=torch.bool)
    mean_N = mean_by(reward_N, group_N, int(group_N.max()) + 1)[group_N]
    above_N = mean_N > (-torch.inf if low is None else low)
    return above_N & (mean_N < (torch.inf if high is None else high))
