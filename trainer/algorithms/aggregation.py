"""Losses of tokens to one number, by counts over the *whole* batch.

A function answers with the weight of each token and with its rows' share of the normaliser, from the rows' mask alone.
The loss is the sum of weight * loss over every row of every rank, divided by the sum of the shares. So packing,
micro-batches and ranks cannot change the result.

Legend: R rows, T positions.
"""

from typing import Protocol

import torch
from torch import Tensor


class Aggregation(Protocol):
    def __call__(self, mask_RT: Tensor, /) -> tuple[Tensor, float]:
        """bool[R, T], true on tokens that the policy wrote, to (f32[R, T] weights, share of the normaliser)."""
        ...


def token_mean(mask_RT: Tensor) -> tuple[Tensor, float]:
    """Every token counts alike; long trajectories weigh more (DAPO)."""
    return mask_RT.float(), float(mask_RT.sum())


def seq_mean_token_mean(mask_RT: Tensor) -> tuple[Tensor, float]:
    """Every trajectory counts alike, whatever its length (GRPO)."""
    tokens_R1 = mask_RT.sum(dim=1, keepdim=True)
    return mask_RT.float() / tokens_R1.clamp(min=1), _rows(mask_RT)


def seq_mean_token_sum(mask_RT: Tensor) -> tuple[Tensor, float]:
    """Tokens summed within a trajectory, trajectories averaged."""
    return mask_RT.float(), _rows(mask_RT)


def seq_mean_token_sum_norm(mask_RT: Tensor, *, length: int = 1024) -> tuple[Tensor, float]:
    """The same in units of a constant length, so that no trajectory's own length enters (Dr. GRPO)."""
    return mask_RT.float() / length, _rows(mask_RT)


def _rows(mask_RT: Tensor) -> float:
    """Rows in which the policy wrote anything."""
    return float(torch.any(mask_RT, dim=1).sum())


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}
