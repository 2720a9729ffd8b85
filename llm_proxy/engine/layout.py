"""Where the buckets of a version lie in host memory, and whether they hold what was sent."""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rollfarm import checksums
from rollfarm.buckets import Bucket
from rollfarm.errors import InvalidArgument, WeightsFailed
from rollfarm.v1 import engine_pb2

_ALIGN_BYTES = 64


class Layout:
    """Buckets one after the other."""

    def __init__(self, plan: Sequence[Bucket]) -> None:
        self._plan = plan
        self._places: list[int] = []
        self.size_bytes = 0
        for bucket in plan:
            self._places.append(self.size_bytes)
            self.size_bytes += -(-bucket.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES

    def buffers(self, memory: Tensor) -> list[Tensor]:
        """Each bucket, as bytes."""
        places = zip(self._plan, self._places, strict=True)
        return [memory[place : place + bucket.size_bytes] for bucket, place in places]

    def tensors(self, memory: Tensor) -> list[tuple[str, Tensor]]:
        """Each bucket's tensors."""
        views: list[tuple[str, Tensor]] = []
        for bucket, buffer in zip(self._plan, self.buffers(memory), strict=True):
            flat = buffer.view(getattr(torch, bucket.dtype))
            views += [(s.name, flat[s.offset : s.offset + s.numel].view(s.shape)) for s in bucket.slots]
        return views


def table_for(buffers: Sequence[Tensor]) -> Tensor:
    """Room for their checksums."""
    return torch.empty(len(buffers) * checksums.TABLE_ITEM_BYTES, dtype=torch.uint8)


def check_sums(filled: Iterable[Tensor], table: Tensor) -> None:
    """Look at each buffer as soon as it is filled; the table of their checksums comes last. Raises WeightsFailed."""
    sums = [b"" if buffer is table else checksums.of_bucket(buffer.numpy()) for buffer in filled]
    told = table.numpy().tobytes()
    for index, own in enumerate(sums[:-1]):
        place = index * checksums.TABLE_ITEM_BYTES
        if told[place : place + checksums.TABLE_ITEM_BYTES] != own:
            raise WeightsFailed(f"Bucket {index} of {len(sums) - 1} is not what was sent: its checksum differs.")


def copy_shared(weights: engine_pb2.SharedWeights, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Fill each buffer from the memory of another process. Raises InvalidArgument and WeightsFailed."""
    if len(weights.offsets) != len(buffers):
        raise InvalidArgument(f"{len(weights.offsets)} offsets were given for {len(buffers)} buckets and checksums.")
    try:
        with open(os.open(weights.path, os.O_RDONLY), "rb") as file:  # noqa: PTH123 - a descriptor
            size = os.fstat(file.fileno()).st_size
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsFailed(
            f"{weights.path} cannot be mapped: {error}. The trainer has to run on this machine, as the same user and, "
            "in containers, in the same process namespace.",
            path=weights.path,
        ) from error
    for offset, buffer in zip(weights.offsets, buffers, strict=True):
        if not 0 <= offset <= size - buffer.numel():
            raise InvalidArgument(f"A bucket at {offset} is not within the {size} bytes of {weights.path}.")
        buffer.numpy()[:] = np.frombuffer(memory, np.uint8, buffer.numel(), offset)
        yield buffer
