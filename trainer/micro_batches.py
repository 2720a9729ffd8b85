"""Rows to micro-batches, dealt to ranks.

A micro-batch is rows end to end: nothing is padded, and a token budget is a budget of tokens. A model that cannot take
rows so has them padded, and then its budget is one of padded tokens. How rows are grouped never changes a result:
losses are sums, divided by counts over all rows. Every rank has as many micro-batches, for each forward pass may be
collective, and ranks wait for each other in each; so those of one number cost about the same.

Legend: R rows of a micro-batch, T positions of all of them, P those that the policy wrote, L positions of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfarm.images import PlacedImage
from trainer.rows import COLUMNS, Row

ATTENTION_TOKENS = 24_576
"""A row of so many tokens costs as much in attention as in everything else: 12 times the hidden size H, taken as 2048.
Of a layer's multiplications a token has 12 H^2 in matrices, and 2 H for each token before it in attention."""

_Bins = list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one forward pass, end to end."""

    ids_T: Tensor
    """i64."""

    mask_T: Tensor
    """bool, true on tokens that the policy wrote."""

    position_T: Tensor
    """i64, the position in its row."""

    lengths_R: Tensor
    """i64, positions of each row."""

    policy_tokens_R: Tensor
    """i64, tokens in the mask of each row."""

    at_P: Tensor
    """i64, where each token in the mask is among T. The one before belongs to the same row."""

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
    lag_P: Tensor

    longest: int
    """L."""

    images: Sequence[PlacedImage]
    """What the policy saw, row by row; offsets are among T."""

    @property
    def rows(self) -> int:
        """R."""
        return len(self.lengths_R)

    @property
    def ids_RT(self) -> Tensor:
        """i64[R, L], the rows padded on the right by 0: causal attention never looks there from within."""
        return self.padded(self.ids_T)

    def padded(self, values_T: Tensor) -> Tensor:
        """[R, L, ...] of [T, ...]: each row padded on the right by 0."""
        within_RL = torch.arange(self.longest, device=values_T.device) < self.lengths_R[:, None]
        padded_RL = values_T.new_zeros(*within_RL.shape, *values_T.shape[1:])
        return padded_RL.masked_scatter(within_RL.view(*within_RL.shape, *(1 for _ in values_T.shape[1:])), values_T)


def plan(rows: Sequence[Row], world_size: int, token_budget: int, *, padded: bool = False) -> list[list[list[int]]]:
    """For each rank its micro-batches, each the places of its rows in `rows`: at most `token_budget` tokens, those of
    padding included where rows are to be padded.

    A row that is longer than the budget has a micro-batch of its own. Ranks that have fewer get empty ones.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    if padded:
        return _even([_cut(lengths, longest_first[rank::world_size], token_budget) for rank in range(world_size)])
    bins = _first_fit(lengths, longest_first, token_budget)
    count = -(-len(bins) // world_size) * world_size
    bins = _least_first(lengths, longest_first, token_budget, count) or bins
    return _even(_deal(bins, lengths, world_size))


def micro_batch(rows: Sequence[Row], places: Sequence[int], device: torch.device) -> MicroBatch:
    """The rows at these places. Without any, a row in which there is nothing to learn."""
    chosen = [rows[place] for place in places] or [_blank(rows[0])]
    lengths_R = np.array([len(row) for row in chosen], np.int64)
    starts_R = np.cumsum(lengths_R) - lengths_R
    mask_T = np.concatenate([row.mask_T for row in chosen])
    if mask_T[starts_R].any():
        raise ValueError("The first token of a row is in its mask, and nothing predicts it.")
    # Since no row begins in the mask, a run in the mask never reaches over the end of its row.
    begins_T = mask_T & ~np.pad(mask_T, (1, 0))[:-1]
    row_T = np.repeat(np.arange(len(chosen)), lengths_R)
    arrays = {
        "ids_T": np.concatenate([row.ids_T for row in chosen]).astype(np.int64),
        "mask_T": mask_T,
        "position_T": np.arange(len(mask_T)) - starts_R[row_T],
        "lengths_R": lengths_R,
        "policy_tokens_R": np.array([row.policy_tokens for row in chosen], np.int64),
        "at_P": mask_T.nonzero()[0],
        "row_P": row_T[mask_T],
        "action_P": begins_T.cumsum()[mask_T] - 1,
        **{name: np.concatenate([getattr(row, name) for row in chosen]) for name in COLUMNS},
    }
    tensors = {name: torch.as_tensor(array, device=device) for name, array in arrays.items()}
    images = [
        replace(image, offset=image.offset + start)
        for row, start in zip(chosen, starts_R.tolist(), strict=True)
        for image in row.images
    ]
    return MicroBatch(**tensors, longest=int(lengths_R.max()), images=images)


def _first_fit(lengths: NDArray[np.int64], longest_first: Sequence[int], token_budget: int) -> _Bins:
    """As few as first-fit decreasing needs: at most 11/9 of the fewest, and 6/9 (Dosa, 2007)."""
    room = np.zeros(len(lengths), np.int64)
    bins: _Bins = []
    for place in longest_first:
        fits = room[: len(bins)] >= lengths[place]
        chosen = int(fits.argmax()) if fits.any() else len(bins)
        if chosen == len(bins):
            bins.append([])
            room[chosen] = token_budget
        bins[chosen].append(place)
        room[chosen] -= lengths[place]
    return bins


def _least_first(
    lengths: NDArray[np.int64], longest_first: Sequence[int], token_budget: int, count: int
) -> _Bins | None:
    """`count` micro-batches that cost about the same: the next row goes where least is, as long as it fits.

    None when a row fits nowhere. Unless the budget turned rows away, the dearest costs no more than its last row above
    the cheapest (Graham, 1969).
    """
    cost, tokens = np.zeros(count), np.zeros(count, np.int64)
    bins: _Bins = [[] for _ in range(count)]
    for place in longest_first:
        fits = (tokens + lengths[place] <= token_budget) | (tokens == 0)
        if not fits.any():
            return None
        chosen = int(np.where(fits, cost, np.inf).argmin())
        bins[chosen].append(place)
        tokens[chosen] += lengths[place]
        cost[chosen] += _cost(lengths[place])
    return bins


def _deal(bins: _Bins, lengths: NDArray[np.int64], world_size: int) -> list[_Bins]:
    """To ranks, the dearest first and there and back again: micro-batches of one number cost about the same, and ranks
    in all differ by no more than the dearest from the cheapest."""
    dearest_first = sorted(bins, key=lambda places: sum(_cost(lengths[place]) for place in places), reverse=True)
    dealt: list[_Bins] = [[] for _ in range(world_size)]
    for index, places in enumerate(dearest_first):
        turn, seat = divmod(index, world_size)
        dealt[world_size - 1 - seat if turn % 2 else seat].append(places)
    return dealt


def _cut(lengths: NDArray[np.int64], longest_first: list[int], token_budget: int) -> _Bins:
    """Neighbours by length, which are little padded."""
    bins: _Bins = []
    while longest_first:
        count = max(1, token_budget // max(1, int(lengths[longest_first[0]])))
        bins.append(longest_first[:count])
        longest_first = longest_first[count:]
    return bins


def _even(dealt: list[_Bins]) -> list[_Bins]:
    most = max(map(len, dealt))
    return [bins + [[] for _ in range(most - len(bins))] for bins in dealt]


def _cost(length: np.int64) -> float:
    """Of a row, in tokens of a short one."""
    return float(length) * (1 + float(length) / ATTENTION_TOKENS)


def _blank(row: Row) -> Row:
    nothing = np.zeros(0, np.float32)
    mask_T = np.zeros_like(row.mask_T[:1])
    return replace(row, ids_T=row.ids_T[:1], mask_T=mask_T, images=(), **dict.fromkeys(COLUMNS, nothing))
