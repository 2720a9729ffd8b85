"""Process groups that weights come by: this engine and the trainer.

No default process group is used, so groups live side by side, and one that fails disturbs no other.
"""

import datetime
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rollfarm.errors import InvalidArgument, Unsupported, WeightsFailed
from rollfarm.v1 import engine_pb2

_SENDER = 0
_PLACES = 2
"""On the GPU, which weights come by."""

_GPU = 0
"""Weights come to the first GPU that this process sees, which is the engine's: CUDA_VISIBLE_DEVICES says which."""

_WAIT_THEN_RAISE = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""A broadcast whose sender died raises at its timeout. By torch's default its watchdog ends this process."""

Arrived = Callable[[], None]
"""Blocks until a buffer is filled. Raises RuntimeError."""


class _Wire(Protocol):
    under_way: int
    """Broadcasts begun at a time: one comes while the one before is looked at."""

    def begin(self, buffer: Tensor) -> Arrived:
        """Start to fill host memory from the next broadcast. Raises RuntimeError."""
        ...


class Group:
    """One meeting of the trainer (rank 0) and this engine."""

    def __init__(self, group: engine_pb2.WeightGroup, *, seconds: float) -> None:
        """Block until every rank is there. `seconds` bounds this, and every broadcast.

        Raises WeightsFailed, and InvalidArgument and Unsupported for a backend that is not known or not here.
        """
        self.group_name = group.group_name
        self.memory = torch.empty(0, dtype=torch.uint8)
        """What it filled last, for the next version."""

        make = _wire(group.backend)
        host, _, port = group.store_address.rpartition(":")
        timeout = datetime.timedelta(seconds=seconds)
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
            prefix = PrefixStore(group.group_name, store)
            self._wire = make(prefix, group, _address_towards(host, int(port)), timeout)
        except (RuntimeError, ValueError, OSError) as error:
            raise WeightsFailed(
                f"Weight group {group.group_name} at {group.store_address} did not meet: {first_line(error)}.",
                group_name=group.group_name,
                store_address=group.store_address,
            ) from error

    def receive(self, buffers: Iterable[Tensor]) -> Iterator[Tensor]:
        """Each buffer as soon as it is filled, in order; the next one is filled meanwhile.

        Raises WeightsFailed, and then the group is of no further use.
        """
        under_way: deque[tuple[Tensor, Arrived]] = deque()
        try:
            for buffer in buffers:
                under_way.append((buffer, self._wire.begin(buffer)))
                if len(under_way) == self._wire.under_way:
                    yield _arrived(under_way.popleft())
            while under_way:
                yield _arrived(under_way.popleft())
        except RuntimeError as error:
            raise WeightsFailed(
                f"The sender in weight group {self.group_name} vanished: {first_line(error)}.",
                group_name=self.group_name,
            ) from error


def _arrived(expected: tuple[Tensor, Arrived]) -> Tensor:
    buffer, wait = expected
    wait()
    return buffer


Make = Callable[[PrefixStore, engine_pb2.WeightGroup, str, datetime.timedelta], _Wire]


def _wire(backend: str) -> Make:
    if backend == "gloo":
        return _GlooWire
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise Unsupported("Weights cannot come by 'nccl': torch finds no GPU here.", backend=backend)
        return _NcclWire
    raise InvalidArgument(f"Weights cannot come by {backend!r}; this engine knows gloo and nccl.", backend=backend)


class _GlooWire:
    """Into host memory directly."""

    def __init__(
        self, store: PrefixStore, group: engine_pb2.WeightGroup, address: str, timeout: datetime.timedelta
    ) -> None:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        connections = max(1, group.connection_count)
        options._devices = [ProcessGroupGloo.create_device(hostname=address) for _ in range(connections)]
        options._threads = self.under_way = 2 * connections
        self._group: Any = ProcessGroupGloo(store, group.rank, group.world_size, options)

    def begin(self, buffer: Tensor) -> Arrived:
        return self._group.broadcast(buffer, _SENDER).wait


class _NcclWire:
    """Into places on the GPU, and from there into host memory: a version is staged beside the model, not on it."""

    under_way = _PLACES

    def __init__(
        self, store: PrefixStore, group: engine_pb2.WeightGroup, address: str, timeout: datetime.timedelta
    ) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._device = torch.device("cuda", _GPU)
        with _environment(_WAIT_THEN_RAISE), torch.cuda.device(self._device):
            self._group: Any = ProcessGroupNCCL(store, group.rank, group.world_size, options)
        self._places = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(_PLACES)]
        self._count = 0

    def begin(self, buffer: Tensor) -> Arrived:
        index = self._count % _PLACES
        self._count += 1
        if self._places[index].numel() < buffer.numel():
            self._places[index] = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)
        place = self._places[index][: buffer.numel()]
        with torch.cuda.device(self._device):
            work = self._group.broadcast([place])

        def arrived() -> None:
            with torch.cuda.device(self._device):
                work.wait()
                buffer.copy_(place)

        return arrived


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


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to host:port. Nothing is sent: connecting a UDP socket only finds the way.

    gloo listens there. Left to itself it takes the address of the machine's own name: on a stock Debian 127.0.1.1.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def first_line(error: Exception) -> str:
    """What it says, without a full stop."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
