"""The trainer's end: versions published by the trainer's own publisher, over gloo, every few seconds."""

import asyncio
import time
from typing import Any

import torch

from load_tests.engine_killing.evidence import Evidence, Update
from rollfarm.v1 import llm_proxy_pb2
from trainer.weights.groups import Links
from trainer.weights.publisher import Publisher
from trainer.weights.snapshot import Snapshot, take_snapshot

WEIGHT = "simulated.version"
"""The tensor that the simulated engine expects; its value is the version, so a wrong payload gives wrong tokens."""

TRANSFER_SECONDS = 15.0
"""An engine that was just started imports torch first."""


class Stub:
    """llm_proxy as the publisher calls it. Notes when it first says that a version is served."""

    def __init__(self, proxy: Any, evidence: Evidence) -> None:
        self.ListEngines = proxy.ListEngines
        self.BeginWeightUpdate = proxy.BeginWeightUpdate
        self._proxy = proxy
        self._evidence = evidence

    async def CommitWeightUpdate(self, request: llm_proxy_pb2.CommitWeightUpdateRequest, **how: Any) -> Any:
        answer = await self._proxy.CommitWeightUpdate(request, **how)
        for update in self._evidence.updates:
            if update.version == request.policy_version and update.committed_at is None:
                update.committed_at = time.monotonic()
        return answer


class Updates:
    """Publishes a version every `pause_seconds`."""

    def __init__(self, proxy: Any, evidence: Evidence, *, mode: str, rolling: int, pause_seconds: float) -> None:
        """`rolling` engines change at a time; 0 is all at once."""
        self._evidence = evidence
        self._pause_seconds = pause_seconds
        self._publisher = Publisher(
            Stub(proxy, evidence),  # pyright: ignore[reportArgumentType]
            Links(host="127.0.0.1", port=0, timeout_seconds=TRANSFER_SECONDS),
            mode=mode,
            transfer_timeout_seconds=TRANSFER_SECONDS,
            concurrent_engine_count=rolling,
        )

    async def run(self) -> None:
        """Until cancelled; also bring engines that were restarted up to date."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publisher.watch())
            while True:
                await self.publish()
                await asyncio.sleep(self._pause_seconds)

    async def publish(self) -> None:
        """The next version."""
        version = len(self._evidence.updates) + 1
        self._evidence.updates.append(Update(version, time.monotonic()))
        await self._publisher.publish(_weights(version), _announce)


def _weights(version: int) -> Snapshot:
    tensors = [(WEIGHT, torch.tensor([version]))]
    return take_snapshot(tensors, policy_version=version, dtype=torch.float32, bucket_size_bytes=1024)


async def _announce() -> None:
    """There is no sample_buffer."""
