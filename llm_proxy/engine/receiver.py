"""Weights on their way in: joined, received into host memory, held until they are applied.

At most one version is held. Nothing here touches the model: whatever fails, the old weights keep serving.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rollfarm import buckets
from rollfarm.errors import InvalidArgument, WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.gloo import GlooGroup
from rollfarm.v1 import engine_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Staged:
    """A version in host memory."""

    policy_version: int
    tensors: list[tuple[str, Tensor]]


class Receiver:
    """Staging for one model. Its methods are for the event loop; the waiting is done in threads."""

    def __init__(self, expected: Mapping[str, Tensor], *, seconds: float) -> None:
        """`expected`: the model's tensors under all of their names."""
        self._expected = expected
        self._seconds = seconds
        self._group: GlooGroup | None = None
        self._staged: Staged | None = None
        self.applying = asyncio.Lock()
        """Held while staged tensors are read; the next version waits for it."""

    async def join(self, group: engine_pb2.WeightGroup) -> None:
        """Meet the sender. The group joined before is given up first. Raises WeightsFailed and InvalidArgument."""
        if group.backend != "gloo":
            raise InvalidArgument(f"Weights cannot come by {group.backend!r}; this engine knows gloo.")
        self._group = None
        self._group = await in_thread(
            lambda: GlooGroup(
                group_name=group.group_name,
                store_address=group.store_address,
                rank=group.rank,
                world_size=group.world_size,
                seconds=self._seconds,
            )
        )

    async def stage(self, request: engine_pb2.StageWeightsRequest) -> int:
        """Receive a version; its size in bytes.

        Raises WeightsMismatch and WeightsFailed; the group is then given up.
        """
        group = self._group
        if group is None or group.group_name != request.group_name:
            raise WeightsFailed(f"Weight group {request.group_name} is not joined here.", group_name=request.group_name)
        async with self.applying:
            self._staged = None
        try:
            check(request.tensors, self._expected)
            plan = buckets.plan(request.tensors, request.bucket_size_bytes)
            tensors = await in_thread(lambda: group.receive(plan))
        except BaseException:
            if self._group is group:
                self._group = None
            raise
        self._staged = Staged(request.policy_version, tensors)
        return sum(bucket.size_bytes for bucket in plan)

    def staged(self, policy_version: int) -> Staged:
        """The version, if it is held. Raises WeightsNotStaged."""
        if self._staged is None or self._staged.policy_version != policy_version:
            held = "nothing" if self._staged is None else f"version {self._staged.policy_version}"
            raise WeightsNotStaged(f"Version {policy_version} is not staged; {held} is.", policy_version=policy_version)
        return self._staged

    def discard(self, policy_version: int) -> None:
        """Forget the version, if it is held."""
        if self._staged is not None and self._staged.policy_version == policy_version:
            self._staged = None


def check(tensors: Iterable[engine_pb2.TensorSpec], expected: Mapping[str, Tensor]) -> None:
    """Raise WeightsMismatch unless `tensors` give every parameter its value, once.

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


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done in a daemon thread of its own: one that hangs holds up neither others nor the exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.wrap_future(future)
