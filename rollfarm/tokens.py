"""Numpy views of the per-token bytes of the contract, both ways, so that nobody handles raw bytes."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollfarm.errors import InvalidArgument
from rollfarm.v1 import trajectory_pb2

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]

Span = tuple[int, int]
"""A policy version, and how many tokens in a row are of it."""

ID = np.dtype("<i4")
LOGPROB = np.dtype("<f4")


def pack_ids(ids: ArrayLike) -> bytes:
    """[T] token ids as little-endian int32."""
    return np.asarray(ids, dtype=ID).tobytes()


def unpack_ids(data: bytes) -> Ids:
    """[T] read-only view of token ids."""
    return np.frombuffer(_whole(data), ID)


def pack_logprobs(logprobs: ArrayLike) -> bytes:
    """[T] natural-log probabilities as little-endian float32."""
    return np.asarray(logprobs, dtype=LOGPROB).tobytes()


def unpack_logprobs(data: bytes) -> Logprobs:
    """[T] read-only view of log-probabilities, nats."""
    return np.frombuffer(_whole(data), LOGPROB)


def token_count(data: bytes) -> int:
    """T of a packed array."""
    return len(data) // 4


def whole_count(data: bytes) -> int:
    """T of a packed array. Raises InvalidArgument when it is none."""
    return len(_whole(data)) // 4


def append_spans(spans: list[Span], more: Iterable[Span]) -> None:
    """Append `more` to `spans` in place, joining neighbours of one version."""
    for version, count in more:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        else:
            spans.append((version, count))


def versions_of(spans: Sequence[trajectory_pb2.VersionSpan]) -> NDArray[np.int64]:
    """[T] the policy version of each token."""
    return np.repeat(
        np.array([span.policy_version for span in spans], dtype=np.int64),
        np.array([span.token_count for span in spans], dtype=np.int64),
    )


def _whole(data: bytes) -> bytes:
    if len(data) % 4:
        raise InvalidArgument(f"A token array has {len(data)} bytes, which is not a multiple of 4.", size=len(data))
    return data
