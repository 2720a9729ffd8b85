"""The batch as advantages see it: trajectories, the policy's actions in them, and the tokens of these, end to end.

Only tokens that the policy wrote are here, so that no mask can be forgotten; what the environment said lies between two
actions and has no time of its own.

Legend: N trajectories, K actions (turns that the policy wrote), P tokens of all actions, C classes of an index.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Over = Literal["none", "group", "batch"]
"""Which values a mean or a deviation is taken over."""

STD_FLOOR = 1e-6
"""A standard deviation up to this counts as agreement, which teaches nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One batch."""

    group_N: Tensor
    """i64, the group of each trajectory, from 0."""

    reward_N: Tensor
    """f64, its score."""

    trajectory_K: Tensor
    """i64, the trajectory of each action, ascending."""

    step_reward_K: Tensor
    """f64, what the environment paid for each action; 0 where it paid nothing."""

    state_K: Tensor
    """i64, a number for each state of each group, in which the action was taken; -1 where it is not known."""

    action_P: Tensor
    """i64, the action of each token, ascending. An action without tokens is the policy's saying nothing."""

    penalty_P: Tensor | None = None
    """f64, what each token is charged, in units of reward. None charges nothing."""

    value_P: Tensor | None = None
    """f64, what a critic expects of the trajectory before each token, in units of reward. None has no critic."""

    teacher_gap_P: Tensor | None = None
    """f64, log teacher - log policy of each token, as the step began. None has no teacher."""

    @property
    def trajectory_P(self) -> Tensor:
        """i64, the trajectory of each token."""
        return self.trajectory_K[self.action_P]

    @property
    def group_K(self) -> Tensor:
        """i64, the group of each action."""
        return self.group_N[self.trajectory_K]

    def score_N(self) -> Tensor:
        """f64, the score of each trajectory less what its tokens are charged."""
        if self.penalty_P is None:
            return self.reward_N
        return self.reward_N - sum_by(self.penalty_P, self.trajectory_P, len(self.reward_N))

    def credit_K(self) -> Tensor:
        """f64, what each action earned: its step reward, and what the score has beyond them with the last action; less
        what its tokens are charged."""
        if self.penalty_P is None:
            return self._paid_K()
        return self._paid_K() - sum_by(self.penalty_P, self.action_P, len(self.trajectory_K))

    def credit_P(self) -> Tensor:
        """f64, what each token earned, less what it is charged: an action is paid at its last token, and one without
        tokens at the trajectory's last token before it."""
        until_K = count_by(self.action_P, len(self.trajectory_K)).cumsum(0)
        writer_P = torch.cat([self.trajectory_P.new_full((1,), -1), self.trajectory_P])
        paid_K = torch.where(writer_P[until_K] == self.trajectory_K, self._paid_K(), 0.0)
        paid_P = sum_by(paid_K, until_K, len(writer_P))[1:]
        return paid_P if self.penalty_P is None else paid_P - self.penalty_P

    def _paid_K(self) -> Tensor:
        rest_N = self.reward_N - sum_by(self.step_reward_K, self.trajectory_K, len(self.reward_N))
        is_last_K = torch.ones_like(self.trajectory_K, dtype=torch.bool)
        is_last_K[:-1] = self.trajectory_K[1:] != self.trajectory_K[:-1]
        return self.step_reward_K + torch.where(is_last_K, rest_N[self.trajectory_K], 0.0)


def sum_by(values: Tensor, index: Tensor, classes: int) -> Tensor:
    """f64[C], the sum of the values of each class of `index`."""
    return values.new_zeros(classes).index_add(0, index, values)


def mean_by(values: Tensor, index: Tensor, classes: int) -> Tensor:
    """f64[C], the mean of the values of each class; 0 where it has none."""
    return sum_by(values, index, classes) / count_by(index, classes).clamp(min=1)


def count_by(index: Tensor, classes: int) -> Tensor:
    """i64[C], how many are of each class."""
    return torch.bincount(index, minlength=classes)


def centered_by(values: Tensor, index: Tensor) -> Tensor:
    """Each value minus the mean of its class; exactly 0 in a class that agrees."""
    classes = int(index.max()) + 1 if len(index) else 0
    low = values.new_full((classes,), torch.inf).scatter_reduce(0, index, values, "amin")
    high = values.new_full((classes,), -torch.inf).scatter_reduce(0, index, values, "amax")
    return torch.where((low == high)[index], 0.0, values - mean_by(values, index, classes)[index])


def std_by(values: Tensor, index: Tensor) -> Tensor:
    """The standard deviation of each value's class (over all of its n values, not n - 1)."""
    classes = int(index.max()) + 1 if len(index) else 0
    return mean_by(centered_by(values, index).square(), index, classes).sqrt()[index]


def normalized(values: Tensor, group: Tensor, *, mean: Over, std: Over, std_floor: float = STD_FLOOR) -> Tensor:
    """The values minus a mean, in units of a standard deviation, each over the group, the whole batch, or not at all.

    A deviation is that of the values as they were. Where it is at most `std_floor`, the result is 0.
    """
    everything = torch.zeros_like(group)
    over = {"group": group, "batch": everything}
    moved = values if mean == "none" else centered_by(values, over[mean])
    if std == "none":
        return moved
    deviation = std_by(values, over[std])
    return torch.where(deviation > std_floor, moved / deviation.clamp(min=std_floor), 0.0)


def discounted(values: Tensor, index: Tensor, factor: float) -> Tensor:
    """G_t = values_t + factor * G_(t+1) within each class of the ascending `index`."""
    if not len(values):
        return values
    counts = torch.bincount(index)
    place = torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]
    padded = values.new_zeros(len(counts), int(counts.max()))
    padded[index, place] = values
    for position in reversed(range(padded.shape[1] - 1)):
        padded[:, position] += factor * padded[:, position + 1]
    return padded[index, place]
