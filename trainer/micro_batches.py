"""Rows to padded micro-batches, dealt to ranks.

Rows are sorted by length and dealt to ranks, so that micro-batches are little padded and ranks equally busy. How rows
are grouped never changes a result: losses are sums, divided by counts over all rows. Every rank has as many
micro-batches, for each forward pass may be collective.

Legend: R rows of a micro-batch, T positions of a row, P those of them that the policy wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.rows import COLUMNS, Row


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one forward pass, padded on the right."""

    ids_RT: Tensor
    """i64, 0 beyond a row's end: causal attention never looks there from within."""

    mask_RT: Tensor
    """bool, true on tokens that the policy wrote."""

    row_P: Tensor
    """i64, the row of each of these, row by row."""

    action_P: Tensor
    """i64, the action of each: a number for every run of tokens that the policy wrote without a break."""

    behavior_logp_P: Tensor
    """f32; this and what follows as in Row."""

    proximal_logp_P: Tensor
    reference_logp_P: Tensor
    advantage_P: Tensor
    old_value_P: Tensor
    return_P: Tensor

    @property
    def rows(self) -> int:
        """R."""
        return len(self.ids_RT)

    @property
    def policy_tokens_R(self) -> Tensor:
        """i64, tokens in the mask of each row."""
        return self.mask_RT.sum(dim=1)


def plan(rows: Sequence[Row], world_size: int, token_budget: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, each the places of its rows in `rows`: at most `token_budget` padded tokens.

    A row that is longer than the budget has a micro-batch of its own. Ranks that have fewer get empty ones.
    """
    longest_first = sorted(range(len(rows)), key=lambda place: len(rows[place]), reverse=True)
    dealt = [_cut(rows, longest_first[rank::world_size], token_budget) for rank in range(world_size)]
    most = max(map(len, dealt))
    return [each + [[] for _ in range(most - len(each))] for each in dealt]


def micro_batch(rows: Sequence[Row], places: Sequence[int], device: torch.device) -> MicroBatch:
    """The rows at these places. Without any, a row in which there is nothing to learn."""
    chosen = [rows[place] for place in places] or [_blank(rows[0])]
    shape = len(chosen), max(len(row) for row in chosen)
    ids_RT, mask_RT = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for index, row in enumerate(chosen):
        ids_RT[index, : len(row)] = row.ids_T
        mask_RT[index, : len(row)] = row.mask_T
    begins_RT = mask_RT & ~np.pad(mask_RT, ((0, 0), (1, 0)))[:, :-1]
    arrays = {
        "ids_RT": ids_RT,
        "mask_RT": mask_RT,
        "row_P": mask_RT.nonzero()[0],
        "action_P": begins_RT.cumsum().reshape(shape)[mask_RT] - 1,
        **{name: np.concatenate([getattr(row, name) for row in chosen]) for name in COLUMNS},
    }
    return MicroBatch(**{name: torch.as_tensor(array, device=device) for name, array in arrays.items()})


def _cut(rows: Sequence[Row], longest_first: list[int], token_budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    while longest_first:
        count = max(1, token_budget // max(1, len(rows[longest_first[0]])))
        batches.append(longest_first[:count])
        longest_first = longest_first[count:]
    return batches


def _blank(row: Row) -> Row:
    nothing = np.zeros(0, np.float32)
    return replace(row, mask_T=np.zeros_like(row.mask_T), **dict.fromkeys(COLUMNS, nothing))
