"""Losses of tokens to one number, by counts over the *whole* batch.

A function answers with the weight of each row's tokens and with the rows' share of the normaliser, from the number of
tokens in each row alone. The loss is the sum of weight * loss over every row of every rank, divided by the sum of the
shares. So packing, micro-batches and ranks cannot change the result. A row is one sequence: a trajectory, or each
segment of one that the engines were shown in several.

Legend: S rows (sequences).
"""

from typing import Protocol

import torch
from torch import Tensor


class Aggregation(Protocol):
    def __call__(self, tokens_S: Tensor, /) -> tuple[Tensor, float]:
        """i64[S] tokens that the policy wrote in each row, to (f32[S] the weight of a row's tokens, share)."""
        ...


def token_mean(tokens_S: Tensor) -> tuple[Tensor, float]:
    """Every token counts alike; long sequences weigh more (DAPO)."""
    return torch.ones_like(tokens_S, dtype=torch.float32), float(tokens_S.sum())


def seq_mean_token_mean(tokens_S: Tensor) -> tuple[Tensor, float]:
    """Every row counts alike, whatever its length (GRPO)."""
    return 1.0 / tokens_S.clamp(min=1).float(), _rows(tokens_S)


def seq_mean_token_sum(tokens_S: Tensor) -> tuple[Tensor, float]:
    """Tokens summed within a row, rows averaged."""
    return torch.ones_like(tokens_S, dtype=torch.float32), _rows(tokens_S)


def seq_mean_token_sum_norm(tokens_S: Tensor, *, length: int = 1024) -> tuple[Tensor, float]:
    """The same in units of a constant length, so that no row's own length enters (Dr. GRPO)."""
    return torch.full_like(tokens_S, 1 / length, dtype=torch.float32), _rows(tokens_S)


def _rows(tokens_S: Tensor) -> float:
    """Rows in which the policy wrote anything."""
    return float((tokens_S > 0).sum())


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}
