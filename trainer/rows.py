"""Trajectories to rows, and rows to padded micro-batches.

A row holds every token of one trajectory, or of one segment where it has several, for the engines saw each alone; the
mask marks those that the policy wrote, and nothing else enters the loss. To whatever counts sequences, a row is one.
Rows are sorted by length and dealt to ranks, so that micro-batches are little padded and ranks equally busy. How rows
are grouped never changes a result: losses are sums, divided by counts over all rows.

Legend: R rows of a micro-batch, T positions of a row, P those of them that the policy wrote.
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
    """The tokens of one trajectory, or of one of its segments."""

    ids_T: NDArray[np.int32]
    """Tokens in the policy's vocabulary."""

    mask_T: NDArray[np.bool_]
    """True on tokens that the policy wrote."""

    behavior_logp_P: NDArray[np.float32]
    """Log-probability of each of these under the distribution that it was sampled from, nats."""

    advantage_P: NDArray[np.float32]
    """Unitless."""

    oldest_version: int = 0
    """The oldest weights that sampled any of its tokens."""

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def policy_tokens(self) -> int:
        """Tokens in the mask."""
        return len(self.advantage_P)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one forward pass, padded on the right."""

    ids_RT: Tensor
    """i64, 0 beyond a row's end: causal attention never looks there from within."""

    mask_RT: Tensor
    """bool, true on tokens that the policy wrote."""

    behavior_logp_P: Tensor
    """f32, of the tokens in the mask, row by row."""

    advantage_P: Tensor
    """f32, of the same."""

    row_P: Tensor
    """i64, the row of each."""

    action_P: Tensor
    """i64, the action of each: a number for every run of tokens that the policy wrote without a break."""


def rows_of(trajectory: trajectory_pb2.Trajectory) -> list[Row]:
    """A row for each segment in which the policy wrote anything; at least one, for what was sampled is counted.

    They have no advantages yet. Raises InvalidTrajectory where its arrays do not fit together.
    """
    rows = [_row(trajectory, segment) for segment in _segments(trajectory)]
    return [row for row in rows if row.policy_tokens] or rows[:1]


def _segments(trajectory: trajectory_pb2.Trajectory) -> list[list[trajectory_pb2.Turn]]:
    """The turns, cut where the engines were shown a prompt without those before."""
    segments: list[list[trajectory_pb2.Turn]] = []
    for turn in trajectory.turns:
        if turn.begins_segment or not segments:
            segments.append([])
        segments[-1].append(turn)
    if not segments or any(_by_policy(turns[0]) for turns in segments):
        raise InvalidTrajectory(
            f"Trajectory {trajectory.trajectory_id}, or a segment of it, does not begin with a prompt.",
            trajectory_id=trajectory.trajectory_id,
        )
    return segments


def _row(trajectory: trajectory_pb2.Trajectory, turns: Sequence[trajectory_pb2.Turn]) -> Row:
    ids = [unpack_ids(turn.token_ids) for turn in turns]
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[int] = []
    for turn, ids_T in zip(turns, ids, strict=True):
        by_policy = _by_policy(turn)
        masks.append(np.full(len(ids_T), by_policy))
        if not by_policy:
            continue
        logprobs.append(unpack_logprobs(turn.logprobs))
        versions_T = versions_of(turn.version_spans)
        if not len(ids_T) == len(logprobs[-1]) == len(versions_T):
            raise InvalidTrajectory(
                f"A turn of trajectory {trajectory.trajectory_id} has {len(ids_T)} tokens, {len(logprobs[-1])} "
                f"log-probabilities and {len(versions_T)} versions.",
                trajectory_id=trajectory.trajectory_id,
            )
        versions.extend(int(version) for version in versions_T)
    logp_P = np.concatenate([np.zeros(0, np.float32), *logprobs])
    return Row(
        np.concatenate(ids),
        np.concatenate(masks),
        logp_P,
        np.zeros_like(logp_P),
        oldest_version=min(versions, default=trajectory.oldest_policy_version),
    )


def _by_policy(turn: trajectory_pb2.Turn) -> bool:
    return turn.author == trajectory_pb2.AUTHOR_POLICY


def with_advantages(rows: Sequence[Row], advantage_P: Tensor) -> list[Row]:
    """The rows, each with its part of the advantages of all their tokens, which follow in the order of the rows."""
    cuts = np.cumsum([row.policy_tokens for row in rows])[:-1]
    parts = np.split(advantage_P.float().numpy(), cuts)
    return [replace(row, advantage_P=part) for row, part in zip(rows, parts, strict=True)]


def policy_token_count(rows: Iterable[Row]) -> int:
    """Tokens in the masks."""
    return sum(row.policy_tokens for row in rows)


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
    nothing = np.zeros(0, np.float32)
    return replace(row, mask_T=np.zeros_like(row.mask_T), behavior_logp_P=nothing, advantage_P=nothing)


def _pad(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    shape = len(rows), max(len(row) for row in rows)
    ids_RT, mask_RT = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for index, row in enumerate(rows):
        ids_RT[index, : len(row)] = row.ids_T
        mask_RT[index, : len(row)] = row.mask_T
    begins_RT = mask_RT & ~np.pad(mask_RT, ((0, 0), (1, 0)))[:, :-1]
    arrays = (
        ids_RT,
        mask_RT,
        np.concatenate([row.behavior_logp_P for row in rows]),
        np.concatenate([row.advantage_P for row in rows]),
        mask_RT.nonzero()[0],
        begins_RT.cumsum().reshape(shape)[mask_RT] - 1,
    )
    return MicroBatch(*(torch.as_tensor(array, device=device) for array in arrays))


def encode(rows: Sequence[Row]) -> bytes:
    """The rows as plain arrays (an .npz archive), for the other ranks."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        lengths=np.array([len(row) for row in rows], np.int64),
        counts=np.array([row.policy_tokens for row in rows], np.int64),
        ids=np.concatenate([row.ids_T for row in rows]),
        mask=np.concatenate([row.mask_T for row in rows]),
        behavior_logp=np.concatenate([row.behavior_logp_P for row in rows]),
        advantages=np.concatenate([row.advantage_P for row in rows]),
        oldest_versions=np.array([row.oldest_version for row in rows], np.int64),
    )
    return buffer.getvalue()


def decode(data: bytes) -> list[Row]:
    """The rows that `encode` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        by_position, by_token = np.cumsum(arrays["lengths"])[:-1], np.cumsum(arrays["counts"])[:-1]
        per_row = zip(
            np.split(arrays["ids"], by_position),
            np.split(arrays["mask"], by_position),
            np.split(arrays["behavior_logp"], by_token),
            np.split(arrays["advantages"], by_token),
            arrays["oldest_versions"].tolist(),
            strict=True,
        )
        return [Row(*parts) for parts in per_row]
