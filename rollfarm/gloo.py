"""Receiving weights by gloo: joining the trainer's process group, and filling flat buckets in host memory.

Shared by the engine host and by the plug-in inside vLLM. No default process group is touched, so any number of groups
live side by side, and one that fails disturbs no other. Imports torch, and so is imported where weights arrive alone.
"""

import datetime
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rollfarm.buckets import Bucket
from rollfarm.errors import WeightsFailed

_SENDER = 0


class GlooGroup:
    """One meeting of the trainer (rank 0) and an engine."""

    def __init__(self, *, group_name: str, store_address: str, rank: int, world_size: int, seconds: float) -> None:
        """Block until every rank is there. `seconds` bounds this, and every broadcast.

        Raises WeightsFailed.
        """
        self.group_name = group_name
        self._layout: tuple[Bucket, ...] = ()
        self._buffers: list[Tensor] = []
        host, _, port = store_address.rpartition(":")
        timeout = datetime.timedelta(seconds=seconds)
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
            self._group = ProcessGroupGloo(PrefixStore(group_name, store), rank, world_size, timeout)
        except (RuntimeError, ValueError) as error:
            raise WeightsFailed(
                f"Weight group {group_name} at {store_address} did not meet: {_first_line(error)}.",
                group_name=group_name,
                store_address=store_address,
            ) from error

    def receive(self, buckets: Sequence[Bucket]) -> list[tuple[str, Tensor]]:
        """Block until every bucket is here. The tensors are views of buffers that the next `receive` overwrites.

        Raises WeightsFailed, and then the group is of no further use.
        """
        layout = tuple(buckets)
        if layout != self._layout:
            self._buffers = [torch.empty(bucket.size_bytes, dtype=torch.uint8) for bucket in layout]
            self._layout = layout
        for buffer in self._buffers:
            try:
                self._group.broadcast(buffer, _SENDER).wait()  # pyright: ignore[reportAttributeAccessIssue]
            except RuntimeError as error:
                raise WeightsFailed(
                    f"The sender in weight group {self.group_name} vanished: {_first_line(error)}.",
                    group_name=self.group_name,
                ) from error
        return [view for bucket, buffer in zip(layout, self._buffers, strict=True) for view in _views(bucket, buffer)]


def _views(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Tensor]]:
    flat = buffer.view(getattr(torch, bucket.dtype))
    return [(slot.name, flat[slot.offset : slot.offset + slot.numel].view(slot.shape)) for slot in bucket.slots]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
