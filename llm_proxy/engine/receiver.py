"""Weights on their way in: received or read into host memory, held until they are applied.

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

from llm_proxy.engine.stored import open_version
from rollfarm import buckets
from rollfarm.buckets import Bucket
from rollfarm.errors import InvalidArgument, WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.run import ModelConfig
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2

Allocate = Callable[[int], Tensor]
"""Host memory of so many bytes, as uint8."""

_SENDER = 0
_ALIGN_BYTES = 64
_ONE_EACH = 0
"""The size of buckets that hold one tensor each."""


def in_ram(size: int) -> Tensor:
    """Memory of this process."""
    return torch.empty(size, dtype=torch.uint8)


class GlooGroup:
    """One meeting of the trainer (rank 0) and this engine."""

    def __init__(self, group: engine_pb2.WeightGroup, *, seconds: float) -> None:
        """Block until every rank is there. `seconds` bounds this, and every broadcast. Raises WeightsFailed."""
        self.group_name = group.group_name
        self.memory = in_ram(0)
        """What it filled last, for the next version."""

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

    def receive(self, buffers: Iterable[Tensor]) -> None:
        """Block until every bucket is here. Raises WeightsFailed, and then the group is of no further use."""
        for buffer in buffers:
            try:
                self._group.broadcast(buffer, _SENDER).wait()  # pyright: ignore[reportAttributeAccessIssue]
            except RuntimeError as error:
                raise WeightsFailed(
                    f"The sender in weight group {self.group_name} vanished: {_first_line(error)}.",
                    group_name=self.group_name,
                ) from error


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to host:port. Nothing is sent: connecting a UDP socket only finds the way.

    gloo listens there. Left to itself it takes the address of the machine's own name: on a stock Debian 127.0.1.1.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


class _Layout:
    """Where buckets lie in memory."""

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

    def __init__(
        self,
        expected: Mapping[str, Tensor],
        *,
        seconds: float,
        allocate: Allocate = in_ram,
        model: ModelConfig | None = None,
    ) -> None:
        """`expected`: the model's tensors under all of their names. `model`: what adapters add to."""
        self._expected = expected
        self._model = model
        self._seconds = seconds
        self._allocate = allocate
        self._meeting = ""
        self._group: GlooGroup | None = None
        self._staging: engine_pb2.StageWeightsRequest | None = None
        """The last one begun. One that was begun earlier is not used, however late it ends."""

        self._staged: Staged | None = None
        self._applied: int | None = 0
        """The version in use; None when the weights were discarded."""

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
        joined = await in_thread(lambda: GlooGroup(group, seconds=self._seconds))
        if self._meeting == group.group_name:
            self._group = joined

    async def stage(self, request: engine_pb2.StageWeightsRequest) -> int:
        """Receive a version, or read it from files; its size in bytes.

        Raises WeightsMismatch and WeightsFailed; a group is then given up.
        """
        async with self._reading:
            self._staged = None
        self._staging = request
        memory, tensors = await (self._read(request) if request.HasField("stored") else self._receive(request))
        self._check_newest(request)
        self._staged = Staged(request.policy_version, tensors, memory)
        return sum(tensor.nbytes for _, tensor in tensors)

    def _check_newest(self, request: engine_pb2.StageWeightsRequest) -> None:
        if self._staging is not request:
            raise WeightsFailed(
                f"Version {request.policy_version} was replaced by another while it came.",
                policy_version=request.policy_version,
            )

    async def _receive(self, request: engine_pb2.StageWeightsRequest) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        group = self._group
        if group is None or group.group_name != request.group_name:
            raise WeightsFailed(f"Weight group {request.group_name} is not joined here.", group_name=request.group_name)
        try:
            check(request.tensors, self._expected)
            layout = _Layout(buckets.plan(request.tensors, request.bucket_size_bytes))
            if group.memory.numel() < layout.size_bytes:
                group.memory = self._allocate(layout.size_bytes)
            memory = group.memory
            await in_thread(lambda: group.receive(layout.buffers(memory)))
        except BaseException:
            if self._group is group:
                self._group = None
            raise
        if self._group is not group:
            raise WeightsFailed(f"Weight group {group.group_name} was replaced meanwhile.", group_name=group.group_name)
        return memory, layout.tensors(memory)

    async def _read(self, request: engine_pb2.StageWeightsRequest) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        version = await in_thread(lambda: open_version(request.stored, self._expected, self._model))
        self._check_newest(request)
        specs = version.specs()
        check(specs, self._expected)
        layout = _Layout(buckets.plan(specs, _ONE_EACH))
        memory = self._allocate(layout.size_bytes)
        if self._group is not None:  # an engine elsewhere is told of the newest memory alone
            self._group.memory = in_ram(0)
        tensors = layout.tensors(memory)
        await in_thread(lambda: version.copy_to(tensors))
        return memory, tensors

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

    async def sleep(self, rest: Callable[[], Awaitable[None]], *, discard_weights: bool) -> None:
        """Let the engine `rest` while no version is being applied. Of discarded weights, none counts as applied."""
        async with self._reading:
            if discard_weights:
                self._applied = None
            await rest()

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
