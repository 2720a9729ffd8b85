"""Asks a ledger what became of samples that it accepted and did not deliver, and for batches that it must not deliver.

While the farm runs, so that a reason is heard before it is forgotten; and in the end, of what the farm left on disk.
"""

import asyncio
import shutil
import time
from pathlib import Path

from grpc import aio

from load_tests.buffering import servers
from load_tests.killing.evidence import Drop, Evidence, Remains, Sample
from load_tests.killing.farm import RUN, told_steps
from load_tests.killing.tap import delivery
from rollfarm import rpc
from rollfarm.errors import FarmError, UnknownTrajectory
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc

PERIOD_SECONDS = 1.0
CALL_SECONDS = 5.0
READABLE = "1000000"
"""Trajectories that the ledger that is opened in the end keeps readable: all."""


class LedgerUnreadable(Exception):
    """What the farm left on disk cannot be opened."""


class Inquiry:
    """What is not known yet of the accepted samples."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._heard = 0
        self._delivered = 0
        self._unresolved: dict[str, tuple[float, Sample]] = {}

    async def go_on(self, address: str) -> None:
        """Ask again and again, until cancelled. A ledger that is away is asked later."""
        async with rpc.channel(address) as channel:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                try:
                    await self._ask_for_committed(channel)
                    await self.ask(channel, before=time.time() - PERIOD_SECONDS)
                except FarmError:
                    pass

    @property
    def unresolved(self) -> int:
        """Accepted samples that were neither delivered nor dropped, as far as is known."""
        self._catch_up()
        return len(self._unresolved)

    async def ask(self, channel: aio.Channel, *, before: float) -> frozenset[str]:
        """Ask about every sample accepted until then whose end is not known. Those that the ledger does not know."""
        self._catch_up()
        stub = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        unknown: set[str] = set()
        for name in [name for name, (at, _) in self._unresolved.items() if at <= before]:
            request = pb.GetLineageRequest(trajectory_id=name)
            try:
                lineage = await rpc.call(stub.GetLineage, request, timeout=CALL_SECONDS, retry=False)
            except UnknownTrajectory:
                unknown.add(name)
                continue
            for transition in lineage.transitions:
                if transition.event == "dropped":
                    at = transition.create_time.ToMicroseconds() / 1e6
                    self._evidence.drops[name] = Drop(at, transition.detail, transition.policy_version)
                    del self._unresolved[name]
        return frozenset(unknown)

    def _catch_up(self) -> None:
        for accepted in self._evidence.accepted[self._heard :]:
            self._unresolved[accepted.sample.trajectory_id] = (accepted.at, accepted.sample)
        for batch in self._evidence.deliveries[self._delivered :]:
            for sample in batch.samples:
                self._unresolved.pop(sample.trajectory_id, None)
        self._heard, self._delivered = len(self._evidence.accepted), len(self._evidence.deliveries)

    async def _ask_for_committed(self, channel: aio.Channel) -> None:
        """Ask in the trainer's name for a batch that was acknowledged as committed. Nothing must come."""
        step = self._evidence.committed() - 1
        if step < 0:
            return
        trainer_id, began = self._evidence.deliveries[-1].trainer_id, time.time()
        stub = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        request = pb.LeaseBatchRequest(run_id=RUN, trainer_id=trainer_id, step=step)
        try:
            parts = [part async for part in rpc.stream(stub.LeaseBatch, request, timeout=CALL_SECONDS)]
        except FarmError:
            return
        if parts:
            raw = [part.SerializeToString() for part in parts]
            self._evidence.recommitted.append(delivery(raw, trainer_id, began))


def read_remains(folder: Path, evidence: Evidence, inquiry: Inquiry) -> Remains:
    """Open what the farm left on disk, a copy of it, with a Valkey and a sample_buffer that nobody kills.

    Raises LedgerUnreadable.
    """
    shutil.copytree(folder / RUN / "valkey", folder / "data")
    try:
        return _opened(folder, evidence, inquiry)
    except SystemExit as unreadable:
        raise LedgerUnreadable(str(unreadable)) from None


def _opened(folder: Path, evidence: Evidence, inquiry: Inquiry) -> Remains:
    with servers.valkey(folder, "always") as valkey:
        flags = ("--sample_buffer.retained_trajectories", READABLE)
        with servers.buffer(folder, valkey.url, *flags) as buffer:
            return asyncio.run(_read(buffer.address, folder, evidence, inquiry))


async def _read(address: str, folder: Path, evidence: Evidence, inquiry: Inquiry) -> Remains:
    async with rpc.channel(address) as channel:
        stub = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        status = await rpc.call(stub.GetStatus, pb.GetStatusRequest(run_id=RUN), timeout=CALL_SECONDS)
        unknown = await inquiry.ask(channel, before=time.time())
    return Remains(
        policy_version=status.policy_version,
        next_commit_step=status.next_commit_step,
        next_group_index=status.next_group_index,
        credits_in_use=status.credits_in_use_count,
        dropped=sum(status.dropped_group_counts.values()),
        outstanding=sum(status.group_counts.values()),
        finished=0 < status.spec.step_count <= status.next_commit_step,
        unknown=unknown,
        steps=told_steps(folder),
    )
