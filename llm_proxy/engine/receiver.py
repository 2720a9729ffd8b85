"""Weights on their way in: received or read into host memory, held until they are applied.

At most one version is held. Nothing here touches the model: whatever fails, the old weights keep serving. A version
counts as held only when it is what was sent: its checksums agree.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llm_proxy.engine.groups import Group
from llm_proxy.engine.layout import Layout, check_sums, copy_shared, table_for
from llm_proxy.engine.stored import open_version
from rollfarm.errors import InvalidArgument, WeightsBaseMismatch, WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.run import ModelConfig
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2

Allocate = Callable[[int], Tensor]
"""Host memory of so many bytes, as uint8."""

_ONE_EACH = 0
"""The size of buckets that hold one tensor each."""

_DELTA = engine_pb2.StoredWeights.KIND_DELTA


def in_ram(size: int) -> Tensor:
    """Memory of this process."""
    return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Staged:
    """A version in host memory."""

    policy_version: int
    tensors: list[tuple[str, Tensor]]
    memory: Tensor
    """What the tensors are views of."""

    base_policy_version: int | None = None
    """Set where the tensors are only those that differ from that version's."""

    from_files: bool = False


class Receiver:
    """Staging for one model. Its methods are for the event loop; the waiting is done in threads."""

    def __init__(
        self,
        expected: Mapping[str, Tensor],
        *,
        seconds: float,
        allocate: Allocate = in_ram,
        model: ModelConfig | None = None,
        loads_parts: bool = True,
    ) -> None:
        """`expected`: the model's tensors under all of their names. `model`: what adapters add to.

        An engine that cannot load some tensors alone, `loads_parts` False, is given whole versions: what came from
        files is kept after it was applied, and what changes is written into it.
        """
        self._expected = expected
        self._model = model
        self._seconds = seconds
        self._allocate = allocate
        self._loads_parts = loads_parts
        self._whole: Staged | None = None
        """The version in use, where it is kept."""

        self._memory = in_ram(0)
        """What a version in files or in another process's memory was copied to last, for the next one."""

        self._announced: tuple[engine_pb2.StageWeightsRequest, Layout | None] = (engine_pb2.StageWeightsRequest(), None)
        """The tensors that came last by broadcast or shared memory, and where they lie."""

        self._meeting = ""
        self._group: Group | None = None
        self._staging: engine_pb2.StageWeightsRequest | None = None
        """The last one begun. One that was begun earlier is not used, however late it ends."""

        self._staged: Staged | None = None
        self._applied: int | None = 0
        """The version in use; None when the weights were discarded."""

        self._reading = asyncio.Lock()
        """Held while staged tensors are read; the next version waits for it."""

        self._applying: asyncio.Task[float] | None = None

    async def join(self, group: engine_pb2.WeightGroup) -> None:
        """Meet the sender. The group joined before is given up first. Raises WeightsFailed, and InvalidArgument
        and Unsupported for a backend that is not known or not here."""
        self._meeting, self._group = group.group_name, None
        joined = await in_thread(lambda: Group(group, seconds=self._seconds))
        if self._meeting == group.group_name:
            self._group = joined

    async def stage(self, request: engine_pb2.StageWeightsRequest) -> int:
        """Receive a version, or read it; its size in bytes.

        Raises WeightsMismatch, WeightsBaseMismatch and WeightsFailed; a group is then given up.
        """
        async with self._reading:
            self._staged = None
        self._staging = request
        if request.HasField("stored"):
            staged = await self._read(request)
        elif request.HasField("shared"):
            staged = await self._copy(request)
        else:
            staged = await self._receive(request)
        self._check_newest(request)
        self._staged = staged
        return sum(tensor.nbytes for _, tensor in staged.tensors)

    def _check_newest(self, request: engine_pb2.StageWeightsRequest) -> None:
        if self._staging is not request:
            raise WeightsFailed(
                f"Version {request.policy_version} was replaced by another while it came.",
                policy_version=request.policy_version,
            )

    async def _receive(self, request: engine_pb2.StageWeightsRequest) -> Staged:
        group = self._group
        if group is None or group.group_name != request.group_name:
            raise WeightsFailed(f"Weight group {request.group_name} is not joined here.", group_name=request.group_name)
        try:
            layout = self._layout(request)
            if group.memory.numel() < layout.size_bytes:
                group.memory = self._new(layout.size_bytes)
            memory = group.memory
            await in_thread(lambda: _fill(group, layout.buffers(memory), checks=request.checksums))
        except BaseException:
            if self._group is group:
                self._group = None
            raise
        if self._group is not group:
            raise WeightsFailed(f"Weight group {group.group_name} was replaced meanwhile.", group_name=group.group_name)
        return Staged(request.policy_version, layout.tensors(memory), memory)

    def _layout(self, request: engine_pb2.StageWeightsRequest) -> Layout:
        """Of what is announced, which is usually what came before. Raises WeightsMismatch and InvalidArgument."""
        known, layout = self._announced
        if layout is None or request.tensors != known.tensors or request.bucket_size_bytes != known.bucket_size_bytes:
            check(request.tensors, self._expected)
            layout = Layout(request.tensors, request.bucket_size_bytes)
            self._announced = request, layout
        return layout

    async def _copy(self, request: engine_pb2.StageWeightsRequest) -> Staged:
        layout = self._layout(request)
        memory = self._taken(layout.size_bytes)
        await in_thread(lambda: copy_shared(request.shared, layout.buffers(memory)))
        self._check_newest(request)
        self._memory = memory
        return Staged(request.policy_version, layout.tensors(memory), memory)

    async def _read(self, request: engine_pb2.StageWeightsRequest) -> Staged:
        base = self._base_of(request.stored)
        version = await in_thread(lambda: open_version(request.stored, self._expected, self._model))
        self._check_newest(request)
        specs = version.specs()
        check(specs, self._expected, whole=base is None)
        layout = Layout(specs, _ONE_EACH)
        memory = self._taken(layout.size_bytes) if base is None else in_ram(layout.size_bytes)
        tensors = layout.tensors(memory)
        await in_thread(lambda: version.copy_to(tensors))
        self._check_newest(request)
        if base is None and self._loads_parts:
            self._memory = memory
        return Staged(request.policy_version, tensors, memory, base, from_files=True)

    def _base_of(self, weights: engine_pb2.StoredWeights) -> int | None:
        """The version that a delta changes, which has to be the one in use; None for a whole version."""
        if weights.kind != _DELTA:
            return None
        if not weights.HasField("base_policy_version"):
            raise InvalidArgument("The stored delta names no base_policy_version.")
        base, here = weights.base_policy_version, self._applied
        if base != here or not (self._loads_parts or self._whole):
            problem = "has no weights" if here is None else f"serves version {here}"
            if base == here:
                problem += " and did not read it from files"
            raise WeightsBaseMismatch(
                f"The delta changes version {base}; this engine {problem}.", base_policy_version=base
            )
        return base

    def _taken(self, size_bytes: int) -> Tensor:
        """Memory for a whole version, which is nobody else's while it is filled: a version that comes before this one
        has ended finds other memory."""
        memory = self._memory if self._memory.numel() >= size_bytes else self._new(size_bytes)
        self._memory = in_ram(0)
        return memory

    def _new(self, size_bytes: int) -> Tensor:
        """Memory for a whole version. What is kept or was used before goes: an engine elsewhere is told of the newest
        memory alone."""
        self._whole = None
        self._memory = in_ram(0)
        if self._group is not None:
            self._group.memory = in_ram(0)
        return self._allocate(size_bytes)

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
            staged = self._held(policy_version)
            if staged.base_policy_version is not None and not self._loads_parts:
                staged = await in_thread(lambda: self._completed(staged))
            seconds = await load(staged)
            self._applied = policy_version
            self._whole = staged if staged.from_files and not self._loads_parts else None
            self.discard(policy_version)
            return seconds

    async def sleep(self, rest: Callable[[], Awaitable[None]], *, discard_weights: bool) -> None:
        """Let the engine `rest` while no version is being applied. Of discarded weights, none counts as applied."""
        async with self._reading:
            if discard_weights:
                self._applied = self._whole = None
            await rest()

    def _held(self, policy_version: int) -> Staged:
        if self._staged is None or self._staged.policy_version != policy_version:
            held = "nothing" if self._staged is None else f"version {self._staged.policy_version}"
            raise WeightsNotStaged(f"Version {policy_version} is not staged; {held} is.", policy_version=policy_version)
        if self._staged.base_policy_version not in (None, self._applied):
            raise WeightsNotStaged(f"Version {policy_version} changes one that is gone.", policy_version=policy_version)
        return self._staged

    def _completed(self, delta: Staged) -> Staged:
        """What is kept, with the tensors that differ written into it: the engine has its own copy of it."""
        whole, self._whole = self._whole, None
        assert whole is not None, "a delta was staged on nothing"
        for name, tensor in delta.tensors:
            for other, own in whole.tensors:
                if self._expected[other] is self._expected[name]:
                    own.copy_(tensor)
        return replace(whole, policy_version=delta.policy_version)

    def discard(self, policy_version: int) -> None:
        """Forget the version, if it is held."""
        if self._staged is not None and self._staged.policy_version == policy_version:
            self._staged = None


def _fill(group: Group, buffers: list[Tensor], *, checks: bool) -> None:
    """Receive the buckets, and the table of their checksums where there is one."""
    if checks:
        table = table_for(buffers)
        check_sums(group.receive([*buffers, table]), table)
    else:
        for _ in group.receive(buffers):
            pass


def check(tensors: Iterable[engine_pb2.TensorSpec], expected: Mapping[str, Tensor], *, whole: bool = True) -> None:
    """Raise WeightsMismatch unless `tensors` are the model's and, together, give every parameter its value.

    Not `whole`, they may be any of them. Tensors that share memory (tied heads) may come under one of their names or
    under several.
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
        if whole and isinstance(own, torch.nn.Parameter) and id(own) not in seen:
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
