"""Trajectories to rows.

A row holds every token of one trajectory, or of one segment where it has several, for the engines saw each alone; the
mask marks those that the policy wrote, and nothing else enters the loss. To whatever counts sequences, a row is one.

Legend: T positions of a row, P those of them that the policy wrote.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfarm import images
from rollfarm.errors import InvalidTrajectory
from rollfarm.images import PlacedImage
from rollfarm.tokens import token_count, unpack_ids, unpack_logprobs
from rollfarm.v1 import trajectory_pb2

Column = Literal[
    "behavior_logp_P",
    "proximal_logp_P",
    "reference_logp_P",
    "advantage_P",
    "old_value_P",
    "return_P",
    "lag_P",
]
"""What is known of each token that the policy wrote."""

COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The tokens of one trajectory, or of one of its segments. Columns that are not known are zeros."""

    ids_T: NDArray[np.int32]
    """Tokens in the policy's vocabulary."""

    mask_T: NDArray[np.bool_]
    """True on tokens that the policy wrote. Never on the first: nothing is before it."""

    behavior_logp_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-probability of each of these under the distribution that it was sampled from, nats."""

    proximal_logp_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """The same under the weights as the step began."""

    reference_logp_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """The same under the reference model."""

    advantage_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Unitless."""

    old_value_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """What the critic expected as the step began, in units of reward."""

    return_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """What it should have expected."""

    lag_P: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Versions from the oldest weights that sampled any token of the row to the newest, as the batch was taken."""

    oldest_version: int = 0
    """The oldest weights that sampled any of its tokens."""

    images: Sequence[PlacedImage] = ()
    """What the policy saw, in order, as it was encoded: pixels are made of it where they are needed, for they take a
    hundred times the room."""

    def __post_init__(self) -> None:
        count = int(self.mask_T.sum())
        for name in COLUMNS:
            column_P = getattr(self, name)
            if not len(column_P) and count:
                object.__setattr__(self, name, np.zeros(count, np.float32))

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def policy_tokens(self) -> int:
        """Tokens in the mask."""
        return len(self.behavior_logp_P)


def rows_of(trajectory: trajectory_pb2.Trajectory) -> list[Row]:
    """A row for each segment in which the policy wrote anything; at least one, for what was sampled is counted.

    They have no advantages yet. Raises InvalidTrajectory where its arrays do not fit together.
    """
    known: dict[bytes, bytes] = {}
    rows = [_row(trajectory, segment, known) for segment in _segments(trajectory)]
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


def _row(trajectory: trajectory_pb2.Trajectory, turns: Sequence[trajectory_pb2.Turn], known: dict[bytes, bytes]) -> Row:
    """`known` holds the images of the turns before by their SHA-256, and gets those of these."""
    ids = [turn.token_ids for turn in turns]
    by_policy = [_by_policy(turn) for turn in turns]
    logprobs: list[bytes] = []
    versions: list[int] = []
    for turn in compress(turns, by_policy):
        _check_whole(trajectory, turn)
        logprobs.append(turn.logprobs)
        versions += [span.policy_version for span in turn.version_spans if span.token_count]
    return Row(
        unpack_ids(b"".join(ids)),
        np.repeat(by_policy, list(map(token_count, ids))),
        unpack_logprobs(b"".join(logprobs)),
        oldest_version=min(versions, default=trajectory.oldest_policy_version),
        images=_images(trajectory, turns, known),
    )


def _check_whole(trajectory: trajectory_pb2.Trajectory, turn: trajectory_pb2.Turn) -> None:
    """Raise InvalidTrajectory unless each token has a log-probability and a version."""
    versions = sum(span.token_count for span in turn.version_spans)
    if not len(turn.token_ids) == len(turn.logprobs) == 4 * versions:
        raise InvalidTrajectory(
            f"A turn of trajectory {trajectory.trajectory_id} has {token_count(turn.token_ids)} tokens, "
            f"{token_count(turn.logprobs)} log-probabilities and {versions} versions.",
            trajectory_id=trajectory.trajectory_id,
        )


def _images(
    trajectory: trajectory_pb2.Trajectory, turns: Sequence[trajectory_pb2.Turn], known: dict[bytes, bytes]
) -> list[PlacedImage]:
    if not any(turn.images for turn in turns):
        return []
    placed: list[PlacedImage] = []
    at = 0
    for turn in turns:
        count = token_count(turn.token_ids)
        try:
            placed += images.place(turn.images, count, known, at=at)
        except images.BadImage as problem:
            raise InvalidTrajectory(
                f"In trajectory {trajectory.trajectory_id} {problem}.", trajectory_id=trajectory.trajectory_id
            ) from None
        at += count
    return placed


def _by_policy(turn: trajectory_pb2.Turn) -> bool:
    return turn.author == trajectory_pb2.AUTHOR_POLICY


def with_column(rows: Sequence[Row], name: Column, values_P: Tensor) -> list[Row]:
    """The rows, each with its part of a column of all their tokens, which follow in the order of the rows."""
    cuts = np.cumsum([row.policy_tokens for row in rows], dtype=np.int64)[:-1]
    parts = np.split(values_P.float().cpu().numpy(), cuts)
    return [replace(row, **{name: part}) for row, part in zip(rows, parts, strict=True)]


def column(rows: Sequence[Row], name: Column) -> Tensor:
    """f64[P], the column of all their tokens."""
    parts: list[NDArray[np.float32]] = [getattr(row, name) for row in rows]
    return torch.as_tensor(np.concatenate([np.zeros(0), *parts]))


def policy_token_count(rows: Iterable[Row]) -> int:
    """Tokens in the masks."""
    return sum(row.policy_tokens for row in rows)


def encode(rows: Sequence[Row]) -> bytes:
    """The rows as plain arrays (an .npz archive), for the other ranks; an image that several rows see is in it once."""
    buffer = io.BytesIO()
    seen = [image for row in rows for image in row.images]
    numbers = {data: number for number, data in enumerate(dict.fromkeys(image.data for image in seen))}
    arrays = {
        "lengths": np.array([len(row) for row in rows], np.int64),
        "counts": np.array([row.policy_tokens for row in rows], np.int64),
        "ids": np.concatenate([row.ids_T for row in rows]),
        "mask": np.concatenate([row.mask_T for row in rows]),
        "oldest_versions": np.array([row.oldest_version for row in rows], np.int64),
        "image_counts": np.array([len(row.images) for row in rows], np.int64),
        "images": np.array([_place(image, numbers) for image in seen], np.int64).reshape(-1, 4),
        "image_sizes": np.array([len(data) for data in numbers], np.int64),
        "image_data": np.frombuffer(b"".join(numbers), np.uint8),
        **{name: np.concatenate([getattr(row, name) for row in rows]) for name in COLUMNS},
    }
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def decode(data: bytes) -> list[Row]:
    """The rows that `encode` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        by_position, by_token = np.cumsum(arrays["lengths"])[:-1], np.cumsum(arrays["counts"])[:-1]
        ends = np.cumsum(arrays["image_sizes"])
        encoded: list[bytes] = [part.tobytes() for part in np.split(arrays["image_data"], ends)]
        places: list[tuple[int, int, int, int]] = arrays["images"].tolist()
        seen = [PlacedImage(encoded[which], _MEDIA_TYPES[kind], at, count) for which, kind, at, count in places]
        last = np.cumsum(arrays["image_counts"]).tolist()
        per_row = zip(
            np.split(arrays["ids"], by_position),
            np.split(arrays["mask"], by_position),
            *(np.split(arrays[name], by_token) for name in COLUMNS),
            arrays["oldest_versions"].tolist(),
            [seen[end - count : end] for end, count in zip(last, arrays["image_counts"].tolist(), strict=True)],
            strict=True,
        )
        return [Row(*parts) for parts in per_row]


_MEDIA_TYPES = tuple(images.MEDIA_TYPES)


def _place(image: PlacedImage, numbers: Mapping[bytes, int]) -> tuple[int, int, int, int]:
    """Which image it is, of which kind, and where."""
    return numbers[image.data], _MEDIA_TYPES.index(image.media_type), image.offset, image.count
