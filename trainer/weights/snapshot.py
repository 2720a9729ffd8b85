"""One version's weights as the flat buffers that are broadcast: immutable, in host memory, in the engines' dtype.

A snapshot outlives the optimiser steps after it, so an engine that starts late gets exactly the version that serves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollfarm import buckets
from rollfarm.v1 import engine_pb2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of one version."""

    policy_version: int
    """The version."""

    specs: list[engine_pb2.TensorSpec]
    """Every tensor, in the order of the broadcast."""

    bucket_size_bytes: int
    """As engines plan it too."""

    buffers: list[Tensor]
    """u8[bytes] for each bucket of `buckets.plan`."""

    @property
    def size_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self.buffers)


def take_snapshot(
    tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, dtype: torch.dtype, bucket_size_bytes: int
) -> Snapshot:
    """Copy the tensors; floating-point ones are sent as `dtype`, others as they are."""
    by_name = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in tensors
    }
    specs = [
        engine_pb2.TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
        for name, tensor in by_name.items()
    ]
    buffers = [_fill(bucket, by_name) for bucket in buckets.plan(specs, bucket_size_bytes)]
    return Snapshot(policy_version, specs, bucket_size_bytes, buffers)


def _fill(bucket: buckets.Bucket, tensors: dict[str, Tensor]) -> Tensor:
    flat = torch.empty(bucket.numel, dtype=getattr(torch, bucket.dtype))
    for slot in bucket.slots:
        flat[slot.offset : slot.offset + slot.numel].copy_(tensors[slot.name].reshape(-1))
    return flat.view(torch.uint8)
