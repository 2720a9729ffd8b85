"""Rows end to end, as a context-parallel rank sees them.

Causal attention makes late positions dearer than early ones, so each row is cut into twice as many equal chunks as
there are context-parallel ranks, and rank r takes chunk r and the r-th from the end. Rows are padded on the right until
they divide, where no position that counts ever looks.

Legend: T positions that this rank has, P tokens that the policy wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What one forward pass reads."""

    ids_T: Tensor
    """i64."""

    positions_T: Tensor
    """i64, each position's place in its row."""

    lengths: Tensor
    """i64 on the CPU, of each row with its padding, over all ranks."""

    mine_P: Tensor
    """bool, the tokens that this rank predicts."""

    sources: Tensor
    """i64, where among T each of these is predicted."""

    ids_P: Tensor
    """i64, every token that the policy wrote."""


def pack(rows: Sequence[Row], *, rank: int, size: int, multiple: int, device: torch.device) -> Packed:
    """The share of context-parallel rank `rank` of `size`: as many positions on each, a multiple of `multiple`."""
    chunks = 2 * size if size > 1 else 1
    lengths = [_rounded_up(len(row), chunks) for row in rows] or [chunks]
    lengths[-1] += _rounded_up(sum(lengths), chunks * multiple) - sum(lengths)
    starts = np.cumsum([0, *lengths])
    ids = np.zeros(starts[-1], np.int64)
    sources: list[np.ndarray] = [np.zeros(0, np.int64)]
    targets: list[np.ndarray] = [np.zeros(0, np.int64)]
    for start, row in zip(starts, rows, strict=False):
        ids[start : start + len(row)] = row.ids_T
        sources.append(start + row.mask_T.nonzero()[0] - 1)
        targets.append(row.ids_T[row.mask_T])
    places = places_of(lengths, rank, size)
    local = np.full(starts[-1], -1)
    local[places] = np.arange(len(places))
    source_P = local[np.concatenate(sources)]
    mine_P = source_P >= 0
    positions = np.concatenate([np.arange(length) for length in lengths])

    def there(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=device)

    return Packed(
        ids_T=there(ids[places]),
        positions_T=there(positions[places]),
        lengths=torch.tensor(lengths),
        mine_P=there(mine_P),
        sources=there(source_P[mine_P]),
        ids_P=there(np.concatenate(targets).astype(np.int64)),
    )


def places_of(lengths: Sequence[int], rank: int, size: int) -> np.ndarray:
    """i64[T], where among all positions those of a rank lie, in its order."""
    if size == 1:
        return np.arange(sum(lengths))
    starts = np.cumsum([0, *lengths])[:-1]
    parts: list[np.ndarray] = []
    for start, length in zip(starts, lengths, strict=True):
        each = length // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(start + chunk * each, start + (chunk + 1) * each))
    return np.concatenate(parts)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
