"""Where the buckets of a version lie in host memory, and whether they hold what was sent."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rollfarm import buckets, checksums
from rollfarm.errors import InvalidArgument, WeightsFailed
from rollfarm.v1 import engine_pb2

_ALIGN_BYTES = 64

_THREADS = 4
"""Buffers that are copied at a time."""


class Layout:
    """Buckets one after the other."""

    def __init__(self, tensors: Iterable[engine_pb2.TensorSpec], bucket_size_bytes: int) -> None:
        """As `buckets.plan` packs them. Raises InvalidArgument."""
        self._plan = buckets.plan(tensors, bucket_size_bytes)
        self._bucket_size_bytes = bucket_size_bytes
        self._places: list[int] = []
        self.size_bytes = 0
        for bucket in self._plan:
            self._places.append(self.size_bytes)
            self.size_bytes += -(-bucket.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES

    def buffers(self, memory: Tensor) -> list[Tensor]:
        """u8[bytes] for each piece of the buckets, in the order in which they come."""
        return [
            bucket[piece]
            for bucket in self._buckets(memory)
            for piece in buckets.pieces(bucket.numel(), self._bucket_size_bytes)
        ]

    def _buckets(self, memory: Tensor) -> list[Tensor]:
        places = zip(self._plan, self._places, strict=True)
        return [memory[place : place + bucket.size_bytes] for bucket, place in places]

    def tensors(self, memory: Tensor) -> list[tuple[str, Tensor]]:
        """Each bucket's tensors."""
        views: list[tuple[str, Tensor]] = []
        for bucket, buffer in zip(self._plan, self._buckets(memory), strict=True):
            flat = buffer.view(getattr(torch, bucket.dtype))
            views += [(s.name, flat[s.offset : s.offset + s.numel].view(s.shape)) for s in bucket.slots]
        return views


def table_for(buffers: Sequence[Tensor]) -> Tensor:
    """Room for their checksums."""
    return torch.empty(len(buffers) * checksums.TABLE_ITEM_BYTES, dtype=torch.uint8)


def check_sums(filled: Iterable[Tensor], table: Tensor) -> None:
    """Look at each buffer as soon as it is filled; the table of their checksums comes last. Raises WeightsFailed."""
    _compare([b"" if buffer is table else checksums.of_buffer(buffer.numpy()) for buffer in filled][:-1], table)


def copy_shared(weights: engine_pb2.SharedWeights, buffers: Sequence[Tensor]) -> None:
    """Fill the buffers from the memory of another process, where the table of their checksums follows them.

    It is read and not mapped: pages that are new to this process cost more than the copy. Raises InvalidArgument and
    WeightsFailed.
    """
    table = table_for(buffers)
    if len(weights.offsets) != len(buffers) + 1:
        raise InvalidArgument(f"{len(weights.offsets)} offsets were given for {len(buffers)} buffers and checksums.")
    try:
        file = os.open(weights.path, os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise WeightsFailed(
            f"{weights.path} cannot be opened: {error}. The trainer has to run on this machine, as the same user and, "
            "in containers, in the same process namespace.",
            path=weights.path,
        ) from error

    def copy(place: tuple[Tensor, int]) -> bytes:
        buffer, offset = place
        _read(file, buffer, offset, weights.path)
        return checksums.of_buffer(buffer.numpy())

    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="copy-weights") as threads:
            sums = list(threads.map(copy, zip(buffers, weights.offsets, strict=False)))
        _read(file, table, weights.offsets[-1], weights.path)
    finally:
        os.close(file)
    _compare(sums, table)


def _read(file: int, buffer: Tensor, offset: int, path: str) -> None:
    left = buffer.numpy().data
    try:
        while left and (count := os.preadv(file, [left], offset)):
            left, offset = left[count:], offset + count
    except OSError as error:
        raise WeightsFailed(f"{path} cannot be read: {error.strerror}.", path=path) from error
    if left:
        raise InvalidArgument(f"A buffer ends at {offset + len(left)}, and {path} before that.", path=path)


def _compare(sums: Sequence[bytes], table: Tensor) -> None:
    told = table.numpy().tobytes()
    for index, own in enumerate(sums):
        place = index * checksums.TABLE_ITEM_BYTES
        if told[place : place + checksums.TABLE_ITEM_BYTES] != own:
            raise WeightsFailed(f"Buffer {index} of {len(sums)} is not what was sent: its checksum differs.")
