"""The trainer's end: its own snapshots and publisher, with a clock beside them."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from torch import Tensor

from rollfarm.v1 import llm_proxy_pb2
from trainer.weights.publisher import Publisher
from trainer.weights.snapshot import Adapter, Snapshot, Snapshots
from trainer.weights.transport import Transport

TRANSFER_SECONDS = 120.0


@dataclass(frozen=True)
class Published:
    """What one version took."""

    take_s: float
    """Copying the weights out of the model."""

    transfer_s: float
    """From the call of the publisher until engines hold the version; what is still to be copied is part of it."""

    publish_s: float
    """From the first copy until engines serve the version."""

    pause_s: float
    """The longest that an engine stood still, as it says."""

    moved_bytes: int
    """That an engine received or read."""

    engines: int
    """That serve it."""

    cpu_s: float
    """CPU time of this process, llm_proxy and the engine hosts together."""


class _Stub:
    """llm_proxy as the publisher calls it, and what was said."""

    def __init__(self, proxy: Any) -> None:
        self.ListEngines = proxy.ListEngines
        self._proxy = proxy
        self.moved_bytes = 0
        self.pause_s = 0.0
        self.engines = 0
        self.begun = asyncio.Event()

    async def BeginWeightUpdate(self, request: llm_proxy_pb2.BeginWeightUpdateRequest, **how: Any) -> Any:
        self.moved_bytes = max((_moved(request, transfer) for transfer in request.transfers), default=0)
        self.begun.set()
        return await self._proxy.BeginWeightUpdate(request, **how)

    async def CommitWeightUpdate(self, request: llm_proxy_pb2.CommitWeightUpdateRequest, **how: Any) -> Any:
        answer = await self._proxy.CommitWeightUpdate(request, **how)
        self.pause_s = answer.pause_duration.ToNanoseconds() / 1e9
        self.engines = len(answer.engine_ids)
        return answer


def _moved(request: llm_proxy_pb2.BeginWeightUpdateRequest, transfer: llm_proxy_pb2.EngineTransfer) -> int:
    from rollfarm import buckets

    if transfer.HasField("stored"):
        return sum(file.size_bytes for file in transfer.stored.files)
    return sum(buckets.size_bytes(tensor) for tensor in request.tensors)


class Trainer:
    """Publishes versions by one transport. Versions go on from one trainer to the next."""

    version = 0

    def __init__(self, proxy: Any, transport: Transport, snapshots: Snapshots, pids: Sequence[int]) -> None:
        """`pids`: of the farm's processes."""
        self._pids = [os.getpid(), *pids]
        self._stub = _Stub(proxy)
        self._snapshots = snapshots
        self._publisher = Publisher(
            self._stub,  # pyright: ignore[reportArgumentType]
            transport,
            mode="keep",
            transfer_timeout_seconds=TRANSFER_SECONDS,
        )

    async def publish(
        self,
        weights: Mapping[str, Tensor],
        *,
        adapter: Adapter | None = None,
        meanwhile: Callable[[], Any] | None = None,
    ) -> Published:
        """The next version; `meanwhile` is called when its transfer has begun."""
        Trainer.version += 1
        version, loop = Trainer.version, asyncio.get_running_loop()
        self._stub.begun.clear()
        began, spent = time.perf_counter(), cpu_seconds(self._pids)
        opened: asyncio.Future[Snapshot] = loop.create_future()

        def take() -> float:
            if adapter is not None:
                loop.call_soon_threadsafe(
                    opened.set_result, self._snapshots.take_adapter(adapter, policy_version=version)
                )
            else:
                self._snapshots.take(
                    weights.items(),
                    policy_version=version,
                    opened=lambda snapshot: loop.call_soon_threadsafe(opened.set_result, snapshot),
                )
            return time.perf_counter() - began

        taking = asyncio.ensure_future(asyncio.to_thread(take))
        snapshot = await opened
        called, staged = time.perf_counter(), 0.0

        async def announce() -> None:
            nonlocal staged
            await taking
            staged = time.perf_counter()

        async def disturb() -> None:
            await self._stub.begun.wait()
            if meanwhile is not None:
                meanwhile()

        disturbing = asyncio.ensure_future(disturb())
        await self._publisher.publish(snapshot, announce)
        ended = time.perf_counter()
        await disturbing
        return Published(
            take_s=await taking,
            transfer_s=staged - called,
            publish_s=ended - began,
            pause_s=self._stub.pause_s,
            moved_bytes=self._stub.moved_bytes,
            engines=self._stub.engines,
            cpu_s=cpu_seconds(self._pids) - spent,
        )


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time that the processes which still live have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids if psutil.pid_exists(pid)]
    return sum(each.user + each.system for each in times)
