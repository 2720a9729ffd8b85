"""Host memory that snapshots are kept in, and used again by later ones: fresh pages cost several times a copy."""

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Arena(Protocol):
    """Memory for the buckets of one snapshot, in order. What was written stays until it is written again."""

    def buffer(self, index: int, size_bytes: int) -> Tensor:
        """u8[at least size_bytes] for bucket `index`; the one that was there before where it is large enough. Pages
        that are never written to take no memory."""
        ...


class RamArena:
    """Memory of this process."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, index: int, size_bytes: int) -> Tensor:
        held = self._buffers.get(index)
        if held is None or held.numel() < size_bytes:
            held = self._buffers[index] = torch.empty(size_bytes, dtype=torch.uint8)
        return held


class SharedArena:
    """Memory that other processes of this machine and user can map. Nothing is left behind, however this one ends."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rollfarm-snapshot")
        self._size = 0
        self._offsets: dict[int, int] = {}
        self._buffers: dict[int, Tensor] = {}
        weakref.finalize(self, os.close, self._file)

    @property
    def path(self) -> str:
        """For as long as this process lives and holds the arena."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def offset(self, index: int) -> int:
        """Where bucket `index` lies in the file."""
        return self._offsets[index]

    def buffer(self, index: int, size_bytes: int) -> Tensor:
        held = self._buffers.get(index)
        if held is None or held.numel() < size_bytes:
            held = self._buffers[index] = self._map(index, size_bytes)
        return held

    def _map(self, index: int, size_bytes: int) -> Tensor:
        size = -(-max(1, size_bytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._offsets[index] = self._size
        self._size += size
        os.ftruncate(self._file, self._size)
        return torch.frombuffer(mmap.mmap(self._file, size, offset=self._offsets[index]), dtype=torch.uint8)


def arena_for(transport: str) -> Callable[[], Arena]:
    """What makes the memory that a transport sends from."""
    return SharedArena if transport == "ipc" else RamArena
