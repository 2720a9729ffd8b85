"""The trainer's end of an NCCL group with one engine: host memory travels by way of this machine's GPU.

Snapshots lie in host memory whatever carries them, because engines that come late need them; so each bucket is copied
to the GPU, broadcast from there, and its place used for the bucket after next.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

_WAIT_THEN_RAISE = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""A broadcast to an engine that died raises at its timeout. By torch's default its watchdog ends this process."""

_PLACES = 2


class NcclGroup:
    """From a GPU of this process to that of the engine host."""

    under_way = _PLACES

    def __init__(self, store: PrefixStore, timeout: timedelta, device: torch.device) -> None:
        """Block until the engine is there. Raises RuntimeError.

        `device` is the trainer's GPU, with its index: the thread that sends is new, and its current GPU is the first.
        """
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._device = device
        with _environment(_WAIT_THEN_RAISE), torch.cuda.device(device):
            self._group: Any = ProcessGroupNCCL(store, 0, 2, options)
        self._places = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(_PLACES)]
        self._count = 0

    def begin(self, part: Tensor) -> Any:
        index = self._count % _PLACES
        self._count += 1
        if self._places[index].numel() < part.numel():
            self._places[index] = torch.empty(part.numel(), dtype=torch.uint8, device=self._device)
        place = self._places[index][: part.numel()]
        with torch.cuda.device(self._device):
            place.copy_(part)
            return self._group.broadcast([place])


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that are read while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
