"""Memory that an inference server on this machine reads weights from."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SharedMemory:
    """Memory that a child opens by path. Nothing is left behind, however this process ends."""

    def __init__(self) -> None:
        self._file = -1

    def allocate(self, size: int) -> Tensor:
        """New memory. What was given out before stays valid, but the child is no longer told of it."""
        self.close()
        self._file = os.memfd_create("rollfarm-weights")
        os.ftruncate(self._file, size)
        return torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def describe(self, memory: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """What the child needs to read `tensors`, which lie in `memory`."""
        return {
            "path": self._path,
            "size_bytes": memory.numel(),
            "tensors": [
                (
                    name,
                    str(tensor.dtype).removeprefix("torch."),
                    list(tensor.shape),
                    tensor.data_ptr() - memory.data_ptr(),
                )
                for name, tensor in tensors
            ],
        }

    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
