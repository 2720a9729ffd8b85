"""Weights on their way in: joined, received into host memory, held until they are applied.

At most one version is held. Nothing here touches the model: whatever fails, the old weights keep serving. No default
process group is used, so groups live side by side, and one that fails disturbs no other.
"""

import asyncio
import datetime
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rollfarm import buckets
from rollfarm.buckets import Bucket
from rollfarm.errors import InvalidArgument, WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2

Allocate = Callable[[int], Tensor]
"""Host memory of so many bytes, as uint8."""

_SENDER = 0
_ALIGN_BYTES = 64


def in_ram(size: int) -> Tensor:
    """Memory of this process."""
    return torch.empty(size, dtype=torch.uint8)


class GlooGroup:
    """One meeting of the trainer (rank 0) and this engine, with the memory that it fills."""

    def __init__(self, group: engine_pb2.WeightGroup, *, seconds: float, allocate: Allocate) -> None:
        """Block until every rank is there. `seconds` bounds this, and every broadcast. Raises WeightsFailed."""
        self.group_name = group.group_name
        self._allocate = allocate
        self._memory = in_ram(0)
        host, _, port = group.store_address.rpartition(":")
        timeout = datetime.timedelta(seconds=seconds)
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
            prefix = PrefixStore(group.group_name, store)
            options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(host, int(port)))]
            self._group = ProcessGroupGloo(prefix, group.rank, group.world_size, options)
        except (RuntimeError, ValueError, OSError) as error:
            raise WeightsFailed(
                f"Weight group {group.group_name} at {group.store_address} did not meet: {_first_line(error)}.",
                group_name=group.group_name,
                store_address=group.store_address,
            ) from error

    def receive(self, plan: Sequence[Bucket]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """Block until every bucket is here: the memory, and the tensors in it. The next `receive` overwrites both.

        Raises WeightsFailed, and then the group is of no further use.
        """
        places = _places(plan)
        if self._memory.numel() < places[-1]:
            self._memory = self._allocate(places[-1])
        views: list[tuple[str, Tensor]] = []
        for bucket, place in zip(plan, places, strict=False):
            buffer = self._memory[place : place + bucket.size_bytes]
            try:
                self._group.broadcast(buffer, _SENDER).wait()  # pyright: ignore[reportAttributeAccessIssue]
            except RuntimeError as error:
                raise WeightsFailed(
                    f"The sender in weight group {self.group_name} vanished: {_first_line(error)}.",
                    group_name=self.group_name,
                ) from error
            flat = buffer.view(getattr(torch, bucket.dtype))
            views += [(s.name, flat[s.offset : s.offset + s.numel].view(s.shape)) for s in bucket.slots]
        return self._memory, views


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to host:port. Nothing is sent: connecting a UDP socket only finds the way.

    gloo listens there. Left to itself it takes the address of the machine's own name: on a stock Debian 127.0.1.1.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def _places(plan: Sequence[Bucket]) -> list[int]:
    """Where each bucket begins in memory, and the end."""
    places = [0]
    for bucket in plan:
        places.append(places[-1] + -(-bucket.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
    return places


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Staged:
    """A version in host memory."""

    policy_version: int
    tensors: list[tuple[str, Tensor]]
    memory: Tensor
    """What the tensors are views of."""


class Receiver:
    """Staging for one model. Its methods are for the event loop; the waiting is done in threads."""

    def __init__(self, expected: Mapping[str, Tensor], *, seconds: float, allocate: Allocate = in_ram) -> None:
        """`expected`: the model's tensors under all of their names."""
        self._expected = expected
        self._seconds = seconds
        self._allocate = allocate
        self._meeting = ""
        self._group: GlooGroup | None = None
        self._staged: Staged | None = None
        self._applied = 0
        self._reading = asyncio.Lock()
        """Held while staged tensors are read; the next version waits for it."""

        self._applying: asyncio.Task[float] | None = None

    async def join(self, group: engine_pb2.WeightGroup) -> None:
        """Meet the sender. The group joined before is given up first. Raises WeightsFailed and InvalidArgument."""
        if group.backend != "gloo":
            raise InvalidArgument(
                f"Weights cannot come by {group.backend!r}; this engine knows gloo.", backend=group.backend
            )
        self._meeting, self._group = group.group_name, None
        joined = await in_thread(lambda: GlooGroup(group, seconds=self._seconds, allocate=self._allocate))
        if self._meeting == group.group_name:
            self._group = joined

    async def stage(self, request: engine_pb2.StageWeightsRequest) -> int:
        """Receive a version; its size in bytes.

        Raises WeightsMismatch and WeightsFailed; the group is then given up.
        """
        group = self._group
        if group is None or group.group_name != request.group_name:
            raise WeightsFailed(f"Weight group {request.group_name} is not joined here.", group_name=request.group_name)
        async with self._reading:
            self._staged = None
        try:
            check(request.tensors, self._expected)
            plan = buckets.plan(request.tensors, request.bucket_size_bytes)
            memory, tensors = await in_thread(lambda: group.receive(plan))
        except BaseException:
            if self._group is group:
                self._group = None
            raise
        if self._group is not group:
            raise WeightsFailed(f"Weight group {group.group_name} was replaced meanwhile.", group_name=group.group_name)
        self._staged = Staged(request.policy_version, tensors, memory)
        return sum(bucket.size_bytes for bucket in plan)

    async def apply(self, policy_version: int, load: Callable[[Staged], Awaitable[float]]) -> float:
        """What `load` makes of the staged version: the seconds that decoding stood still. It is then forgotten.

        Goes on when the caller gives up. The version applied last costs nothing. Raises WeightsNotStaged.
        """
        self._applying = asyncio.create_task(self._apply(policy_version, load), name="apply-weights")
        return await asyncio.shield(self._applying)

    async def _apply(self, policy_version: int, load: Callable[[Staged], Awaitable[float]]) -> float:
        async with self._reading:
            if policy_version == self._applied:
                return 0.0
            seconds = await load(self._held(policy_version))
            self._applied = policy_version
            self.discard(policy_version)
            return seconds

    def _held(self, policy_version: int) -> Staged:
        if self._staged is None or self._staged.policy_version != policy_version:
            held = "nothing" if self._staged is None else f"version {self._staged.policy_version}"
            raise WeightsNotStaged(f"Version {policy_version} is not staged; {held} is.", policy_version=policy_version)
        return self._staged

    def discard(self, policy_version: int) -> None:
        """Forget the version, if it is held."""
        if self._staged is not None and self._staged.policy_version == policy_version:
            self._staged = None


def check(tensors: Iterable[engine_pb2.TensorSpec], expected: Mapping[str, Tensor]) -> None:
    """Raise WeightsMismatch unless `tensors` give every parameter its value.

    Tensors that share memory (tied heads) may come under one of their names or under several.
    """
    seen: set[int] = set()
    for spec in tensors:
        own = expected.get(spec.name)
        if own is None:
            raise WeightsMismatch(f"The model has no tensor {spec.name}.", tensor=spec.name)
        if tuple(spec.shape) != tuple(own.shape):
            raise WeightsMismatch(
                f"Tensor {spec.name} has the shape {list(spec.shape)}; the model's is {list(own.shape)}.",
                tensor=spec.name,
            )
        sent = getattr(torch, spec.dtype, None)
        if not isinstance(sent, torch.dtype) or sent.is_floating_point != own.dtype.is_floating_point:
            raise WeightsMismatch(
                f"Tensor {spec.name} has the dtype {spec.dtype}; the model's is {own.dtype}.", tensor=spec.name
            )
        seen.add(id(own))
    for name, own in expected.items():
        if isinstance(own, torch.nn.Parameter) and id(own) not in seen:
            raise WeightsMismatch(f"Tensor {name} is missing.", tensor=name)


def with_aliases(tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors, and each again under every other name that the model knows it by (tied heads)."""
    named = dict(tensors)
    by_identity = {id(expected[name]): tensor for name, tensor in named.items()}
    return [
        (name, named[name] if name in named else by_identity[id(own)])
        for name, own in expected.items()
        if name in named or id(own) in by_identity
    ]
