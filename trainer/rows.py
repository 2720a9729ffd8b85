"""Trajectories to rows, and rows to padded micro-batches.

A row holds every token of one trajectory; the mask marks those that the policy wrote, and nothing else enters the loss.
Rows are sorted by length and dealt to ranks, so that micro-batches are little padded and ranks equally busy. How rows
are grouped never changes a result: losses are sums, divided by counts over all rows.

Legend: R rows of a micro-batch, T positions of a row.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfarm.errors import InvalidTrajectory
from rollfarm.tokens import unpack_ids, unpack_logprobs, versions_of
from rollfarm.v1 import trajectory_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The tokens of one trajectory."""

    ids_T: NDArray[np.int32]
    """Tokens in the policy's vocabulary."""

    mask_T: NDArray[np.bool_]
    """True on tokens that the policy wrote."""

    behavior_logp_T: NDArray[np.float32]
    """Log-probability of each token under the distribution that it was sampled from, nats; 0 outside the mask."""

    advantage: float = 0.0
    """Unitless, the same for every token of the trajectory."""

    oldest_version: int = 0
    """The oldest weights that sampled any of its tokens."""

    def __len__(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one forward pass, padded on the right. Every tensor is [R, T]."""

    ids_RT: Tensor
    """i64, 0 beyond a row's end: causal attention never looks there from within."""

    mask_RT: Tensor
    """bool, true on tokens that the policy wrote."""

    behavior_logp_RT: Tensor
    """f32, 0 outside the mask."""

    advantage_RT: Tensor
    """f32, constant along a row."""


def row_of(trajectory: trajectory_pb2.Trajectory) -> Row:
    """The trajectory's turns end to end. Raises InvalidTrajectory where its arrays do not fit together."""
    ids = [unpack_ids(turn.token_ids) for turn in trajectory.turns]
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[int] = []
    for turn, ids_T in zip(trajectory.turns, ids, strict=True):
        by_policy = turn.author == trajectory_pb2.AUTHOR_POLICY
        masks.append(np.full(len(ids_T), by_policy))
        logprobs.append(unpack_logprobs(turn.logprobs) if by_policy else np.zeros(len(ids_T), np.float32))
        versions_T = versions_of(turn.version_spans) if by_policy else ()
        if by_policy and not len(ids_T) == len(logprobs[-1]) == len(versions_T):
            raise InvalidTrajectory(
                f"A turn of trajectory {trajectory.trajectory_id} has {len(ids_T)} tokens, {len(logprobs[-1])} "
                f"log-probabilities and {len(versions_T)} versions.",
                trajectory_id=trajectory.trajectory_id,
            )
        versions.extend(int(version) for version in versions_T)
    if not ids or (masks[0].size and masks[0][0]):
        raise InvalidTrajectory(
            f"Trajectory {trajectory.trajectory_id} does not begin with a prompt.",
            trajectory_id=trajectory.trajectory_id,
        )
    return Row(
        np.concatenate(ids),
        np.concatenate(masks),
        np.concatenate(logprobs),
        oldest_version=min(versions, default=trajectory.oldest_policy_version),
    )


def with_advantages(rows: Sequence[Row], advantages: Iterable[float]) -> list[Row]:
    """The rows, each with its advantage."""
    return [replace(row, advantage=advantage) for row, advantage in zip(rows, advantages, strict=True)]


def policy_token_count(rows: Iterable[Row]) -> int:
    """Tokens in the masks."""
    return sum(int(row.mask_T.sum()) for row in rows)


def share_of(rows: Sequence[Row], rank: int, world_size: int) -> list[Row]:
    """The rows that one rank trains on: every world_size-th, longest first."""
    return sorted(rows, key=len, reverse=True)[rank::world_size]


def micro_batches(rows: Sequence[Row], token_budget: int, device: torch.device) -> Iterator[MicroBatch]:
    """The rows, longest first, in micro-batches of at most `token_budget` padded tokens.

    A row that is longer than the budget has a micro-batch of its own.
    """
    longest_first = sorted(rows, key=len, reverse=True)
    while longest_first:
        count = max(1, token_budget // max(1, len(longest_first[0])))
        yield _pad(longest_first[:count], device)
        longest_first = longest_first[count:]


def blank(row: Row) -> Row:
    """The row with nothing to learn, for a rank that has none."""
    return replace(row, mask_T=np.zeros_like(row.mask_T), advantage=0.0)


def _pad(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    shape = len(rows), max(len(row) for row in rows)
    ids_RT, mask_RT = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    behavior_logp_RT, advantage_RT = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for index, row in enumerate(rows):
        ids_RT[index, : len(row)] = row.ids_T
        mask_RT[index, : len(row)] = row.mask_T
        behavior_logp_RT[index, : len(row)] = row.behavior_logp_T
        advantage_RT[index] = row.advantage
    return MicroBatch(
        *(torch.as_tensor(array, device=device) for array in (ids_RT, mask_RT, behavior_logp_RT, advantage_RT))
    )


def encode(rows: Sequence[Row]) -> bytes:
    """The rows as plain arrays (an .npz archive), for the other ranks."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        lengths=np.array([len(row) for row in rows], np.int64),
        ids=np.concatenate([row.ids_T for row in rows]),
        mask=np.concatenate([row.mask_T for row in rows]),
        behavior_logp=np.concatenate([row.behavior_logp_T for row in rows]),
        advantages=np.array([row.advantage for row in rows], np.float64),
        oldest_versions=np.array([row.oldest_version for row in rows], np.int64),
    )
    return buffer.getvalue()


def decode(data: bytes) -> list[Row]:
    """The rows that `encode` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        cuts = np.cumsum(arrays["lengths"])[:-1]
        per_row = zip(
            np.split(arrays["ids"], cuts),
            np.split(arrays["mask"], cuts),
            np.split(arrays["behavior_logp"], cuts),
            arrays["advantages"].tolist(),
            arrays["oldest_versions"].tolist(),
            strict=True,
        )
        return [Row(*fields) for fields in per_row]
