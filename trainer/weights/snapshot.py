"""One version's weights as the flat buffers that are broadcast: in host memory, in the engines' dtype.

A snapshot outlives the optimiser steps after it, so an engine that starts late gets exactly the version that serves. It
is filled tensor by tensor, so beside it there is never more than one tensor, and whoever sends it may begin with the
buckets that are full. Once full it never changes. Its memory is used again when nobody holds the snapshot any more.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollfarm import buckets, checksums
from rollfarm.stored import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollfarm.v1 import engine_pb2
from trainer.weights.memory import Arena, RamArena

MOST_IDLE = 2
"""Versions' memory kept for later ones. More is idle only after somebody held on to old versions, and is given back."""

Specs = list[engine_pb2.TensorSpec]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as peft writes one: what trains, where nothing else does."""

    config_json: bytes
    """adapter_config.json"""

    tensors: Mapping[str, Tensor]
    """adapter_model.safetensors, in host memory."""


def read_adapter(folder: Path) -> Adapter:
    """The adapter that peft, or whoever writes as it does, left in a folder."""
    return Adapter((folder / ADAPTER_CONFIG).read_bytes(), load_file(folder / ADAPTER_WEIGHTS))


class Snapshot:
    """Weights of one version."""

    def __init__(self, policy_version: int, specs: Specs, bucket_size_bytes: int, arena: Arena) -> None:
        """`specs` is empty until it is full where they are not known before."""
        self.policy_version = policy_version
        self.specs = specs
        """Every tensor, in the order of the broadcast."""

        self.bucket_size_bytes = bucket_size_bytes
        """As engines plan it too."""

        self.arena = arena
        """Its buckets, and then the table of their checksums."""

        self.adapter: Adapter | None = None
        """Set, and no tensors, where the version is the base model with an adapter."""

        self._buckets: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._is_full = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def parts(self) -> Iterator[Tensor]:
        """u8[bytes] for each piece of the buckets, and the table of their checksums; each as soon as it is full.

        Raises RuntimeError where the weights could not be gathered.
        """
        index = 0
        while (part := self._part(index)) is not None:
            yield part
            index += 1

    def _part(self, index: int) -> Tensor | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_full or len(self._parts) > index)
            if self._failure is not None:
                raise RuntimeError(f"version {self.policy_version} was not gathered: {self._failure}")
            return self._parts[index] if index < len(self._parts) else None

    @property
    def buffers(self) -> list[Tensor]:
        """u8[bytes] for each bucket of `buckets.plan`; waits until all are full."""
        for _ in self.parts():
            pass
        return self._buckets

    @property
    def size_bytes(self) -> int:
        """Of the tensors, once it is full."""
        return sum(buckets.size_bytes(spec) for spec in self.specs)

    @cached_property
    def digests(self) -> dict[str, bytes]:
        """Of each tensor as it is sent, once it is full; equal ones are of equal tensors."""
        return {spec.name: checksums.of_tensor(data.numpy()) for spec, data in self.tensors()}

    def tensors(self) -> Iterator[tuple[engine_pb2.TensorSpec, Tensor]]:
        """Every tensor's spec and bytes, u8[size], once it is full."""
        specs = iter(self.specs)
        for bucket, buffer in zip(buckets.plan(self.specs, self.bucket_size_bytes), self.buffers, strict=True):
            size = buckets.DTYPE_BYTES[bucket.dtype]
            for slot in bucket.slots:
                yield next(specs), buffer[slot.offset * size : (slot.offset + slot.numel) * size]

    def add(self, part: Tensor) -> None:
        """Whoever fills it: the next piece, or at last the table, is full."""
        with self._changed:
            self._parts.append(part)
            self._changed.notify_all()

    def add_bucket(self, bucket: Tensor) -> None:
        """Whoever fills it: all pieces of the next bucket are there."""
        self._buckets.append(bucket)

    def close(self, specs: Specs, failure: BaseException | None = None) -> None:
        """Whoever fills it: all is there, or will never be."""
        with self._changed:
            self.specs, self._failure, self._is_full = specs, failure, True
            self._changed.notify_all()


Opened = Callable[[Snapshot], object]
"""Called once, when the snapshot's specs are known."""


class Snapshots:
    """Takes the versions of one model."""

    def __init__(
        self, *, dtype: torch.dtype, bucket_size_bytes: int, make_arena: Callable[[], Arena] = RamArena
    ) -> None:
        """Floating-point tensors are sent as `dtype`, others as they are."""
        self._dtype = dtype
        self._bucket_size_bytes = bucket_size_bytes
        self._make_arena = make_arena
        self._idle: deque[Arena] = deque(maxlen=MOST_IDLE)
        self._specs: Specs = []

    def take(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        opened: Opened = lambda snapshot: None,
    ) -> Snapshot:
        """Copy the tensors, each of which has to stay as it is only until the next is asked for.

        From the second version on, `opened` gets the snapshot before it is filled, and may send it meanwhile.
        """
        arena = self._idle.pop() if self._idle else self._make_arena()
        snapshot = Snapshot(policy_version, self._specs, self._bucket_size_bytes, arena)
        weakref.finalize(snapshot, self._idle.append, arena)
        if is_open := bool(self._specs):
            opened(snapshot)
        filling = _Filling(snapshot, self._dtype)
        try:
            for name, tensor in tensors:
                filling.put(name, tensor)
            if self._specs and filling.specs != self._specs:
                raise RuntimeError("the model's tensors are not those of the version before")
        except BaseException as failure:
            snapshot.close(self._specs, failure)
            raise
        filling.finish()
        self._specs = filling.specs
        if not is_open:
            opened(snapshot)
        return snapshot

    def take_adapter(self, adapter: Adapter, *, policy_version: int) -> Snapshot:
        """A version that is the base model and an adapter, which is not changed afterwards."""
        snapshot = Snapshot(policy_version, [], self._bucket_size_bytes, RamArena())
        snapshot.adapter = adapter
        snapshot.close([])
        return snapshot


def take_snapshot(
    tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, dtype: torch.dtype, bucket_size_bytes: int
) -> Snapshot:
    """A single version."""
    return Snapshots(dtype=dtype, bucket_size_bytes=bucket_size_bytes).take(tensors, policy_version=policy_version)


class _Filling:
    """The buckets of a snapshot as `buckets.plan` cuts them, while the tensors are still coming."""

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype) -> None:
        self.specs: Specs = []
        self._snapshot = snapshot
        self._dtype = dtype
        self._buffer: Tensor | None = None
        self._bucket_dtype = ""
        self._filled = 0
        self._bucket_count = 0
        self._sums: list[bytes] = []

    def put(self, name: str, tensor: Tensor) -> None:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        spec = engine_pb2.TensorSpec(name=name, dtype=str(dtype).removeprefix("torch."), shape=tensor.shape)
        size, limit = buckets.size_bytes(spec), self._snapshot.bucket_size_bytes
        if self._buffer is not None and not buckets.fits(spec, self._bucket_dtype, self._filled, limit):
            self._close_bucket()
        if self._buffer is None:
            self._buffer = self._snapshot.arena.buffer(self._bucket_count, max(size, limit))
            self._bucket_dtype = spec.dtype
        place = self._buffer[self._filled : self._filled + size]
        self._filled += size
        self.specs.append(spec)
        if size > limit:
            self._put_pieces(place, tensor.detach(), dtype)
        else:
            place.view(dtype).view(tensor.shape).copy_(tensor.detach())

    def _put_pieces(self, place: Tensor, tensor: Tensor, dtype: torch.dtype) -> None:
        """The only tensor of its bucket: its first bytes are sent while the others are copied, if they lie in order."""
        pieces = buckets.pieces(place.numel(), self._snapshot.bucket_size_bytes)
        flat = tensor.view(-1) if tensor.is_contiguous() else None
        if flat is None:
            self._copy_by_rows(tensor, place.view(dtype).view(tensor.shape))
        for piece in pieces:
            part = place[piece]
            if flat is not None:
                part.view(dtype).copy_(flat[piece.start // dtype.itemsize : piece.stop // dtype.itemsize])
            self._add(part)
        self._end_bucket(place)

    def _copy_by_rows(self, tensor: Tensor, to: Tensor) -> None:
        """As many rows at a time as a bucket holds: each copy of what is not contiguous is made on its device first."""
        rows = max(1, self._snapshot.bucket_size_bytes // (to[0].numel() * to.itemsize))
        for source, target in zip(tensor.split(rows), to.split(rows), strict=True):
            target.copy_(source)

    def finish(self) -> None:
        """The last bucket, and the table of checksums."""
        if self._buffer is not None:
            self._close_bucket()
        table = b"".join(self._sums)
        place = self._snapshot.arena.buffer(self._bucket_count, max(1, len(table)))[: len(table)]
        if table:
            place.copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
        self._snapshot.add(place)
        self._snapshot.close(self.specs)

    def _close_bucket(self) -> None:
        assert self._buffer is not None
        full = self._buffer[: self._filled]
        self._add(full)
        self._end_bucket(full)

    def _add(self, part: Tensor) -> None:
        self._sums.append(checksums.of_buffer(part.numpy()))
        self._snapshot.add(part)

    def _end_bucket(self, bucket: Tensor) -> None:
        self._snapshot.add_bucket(bucket)
        self._buffer, self._filled = None, 0
        self._bucket_count += 1
