"""Rewards to advantages. A group that agrees teaches nothing: all zeros.

Legend: B groups in the batch, G members of a group.
"""

from typing import Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    def __call__(self, rewards_BG: Tensor, /) -> Tensor:
        """f64[B, G] rewards, a row for each group, to f64[B, G] advantages, unitless."""
        ...


def grpo(rewards_BG: Tensor, *, std_floor: float = 1e-6) -> Tensor:
    """Reward minus the group's mean, in units of the group's standard deviation (over its members, not n - 1).

    A standard deviation up to `std_floor` counts as agreement.
    """
    centered_BG = centered(rewards_BG)
    std_B1 = rewards_BG.std(dim=1, correction=0, keepdim=True)
    return torch.where(std_B1 > std_floor, centered_BG / std_B1.clamp(min=std_floor), 0.0)


def centered(rewards_BG: Tensor) -> Tensor:
    """Reward minus the group's mean (Dr. GRPO). Easy and hard tasks weigh less than with grpo."""
    agree_B1 = (rewards_BG == rewards_BG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(agree_B1, 0.0, rewards_BG - rewards_BG.mean(dim=1, keepdim=True))


def rloo(rewards_BG: Tensor) -> Tensor:
    """Reward minus the mean of the *other* members, an unbiased baseline. A lone member gets 0."""
    members = rewards_BG.shape[1]
    if members == 1:
        return torch.zeros_like(rewards_BG)
    return centered(rewards_BG) * (members / (members - 1))


def batch_grpo(rewards_BG: Tensor, *, std_floor: float = 1e-6) -> Tensor:
    """Reward minus the group's mean, in units of the whole batch's standard deviation (Lite PPO)."""
    std = rewards_BG.std(correction=0)
    return torch.where(std > std_floor, centered(rewards_BG) / std.clamp(min=std_floor), 0.0)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": centered,
    "centered": centered,
    "rloo": rloo,
    "batch_grpo": batch_grpo,
}
