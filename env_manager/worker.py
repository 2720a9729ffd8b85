"""Holds leases: takes one for each free slot, keeps them alive while they are played, hands in what came of them.

A lease is in `_held` from the moment it is taken until sample_buffer knows its end, or needs it no more. Every one that
is still held when the worker stops is given back.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
import structlog

from env_manager.completions import Completions
from env_manager.episodes import EpisodeFailed
from rollfarm import rpc, telemetry
from rollfarm.errors import DeadlineExceeded, FarmError, LeaseExpired, is_retryable
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2

log = structlog.get_logger()

POLL_SECONDS = 20.0
"""Longest wait for a lease in one call."""

GIVE_BACK_SECONDS = 3.0
"""How long giving leases back may take when the worker stops. What is left expires by itself."""

REST_SECONDS = 1.0
"""How long the slot of a failed episode stays empty, so that a broken environment does not spin the farm."""

EPISODES = prometheus_client.Counter(
    "rollfarm_env_manager_episodes_total", "Episodes that ended, by outcome.", ["domain", "outcome"]
)
EPISODE_SECONDS = prometheus_client.Histogram(
    "rollfarm_env_manager_episode_seconds",
    "Time to play and score an episode.",
    ["domain"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
HELD = prometheus_client.Gauge("rollfarm_env_manager_held_leases", "Episodes being played.")

Play = Callable[[sample_buffer_pb2.EpisodeLease], Awaitable[trajectory_pb2.Trajectory]]


@dataclass(eq=False)
class _Held:
    lease: sample_buffer_pb2.EpisodeLease
    task: asyncio.Task[None] | None = None
    cancelled: sample_buffer_pb2.CancelledLease | None = field(default=None)

    @property
    def seconds(self) -> float:
        return self.lease.lease_duration.ToNanoseconds() / 1e9


class Worker:
    """Plays leased episodes in `slots` slots."""

    def __init__(self, stub: Any, play: Play, *, worker_id: str, slots: int, environments: Sequence[str] = ()) -> None:
        """`stub` is a SampleBufferServiceStub on an aio channel. No `environments` asks for any."""
        self._stub = stub
        self._completions = Completions(stub)
        self._play = play
        self._worker_id = worker_id
        self._environments = environments
        self._free = slots
        self._freed = asyncio.Event()
        self._held: dict[str, _Held] = {}
        self._leased = asyncio.Event()
        HELD.set_function(lambda: len(self._held))

    async def run(self) -> None:
        """Lease and play until cancelled, then give back what is unfinished."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat())
                group.create_task(self._completions.run())
                await self._lease(group)
        finally:
            await self._give_back()

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        while True:
            while not self._free:
                self._freed.clear()
                await self._freed.wait()
            for lease in await self._ask(self._free):
                held = self._held[lease.lease_id] = _Held(lease)
                self._free -= 1
                held.task = group.create_task(self._hold(held), name=f"episode-{lease.lease_id}")
                self._leased.set()

    async def _ask(self, count: int) -> Sequence[sample_buffer_pb2.EpisodeLease]:
        """Wait for leases. The same question is asked until it is answered, so that no answer is lost."""
        request = sample_buffer_pb2.LeaseEpisodesRequest(
            request_id=str(uuid.uuid4()),
            worker_id=self._worker_id,
            max_leases=count,
            environments=self._environments,
        )
        while True:
            try:
                answer = await rpc.call(self._stub.LeaseEpisodes, request, timeout=POLL_SECONDS)
                return [lease for lease in answer.leases if lease.lease_id not in self._held]
            except FarmError as error:
                if not _is_outage(error):
                    raise
                log.warning("no leases", cause=str(error))

    async def _hold(self, held: _Held) -> None:
        """Play one episode and hand it in. A cancellation by anyone but `_heartbeat` leaves it held."""
        telemetry.begin_trace()
        try:
            failed = await self._settle(held)
        except asyncio.CancelledError:
            if held.cancelled is None:
                raise
            self._count(held, held.cancelled.outcome)
            failed = False
        del self._held[held.lease.lease_id]
        if failed:
            await asyncio.sleep(REST_SECONDS)
        self._free += 1
        self._freed.set()

    async def _settle(self, held: _Held) -> bool:
        """Play and report. True when the episode failed."""
        began = asyncio.get_running_loop().time()
        try:
            trajectory = await self._play(held.lease)
        except EpisodeFailed as failure:
            task = held.lease.episode.task
            log.warning(
                "episode failed",
                lease_id=held.lease.lease_id,
                outcome=trajectory_pb2.Outcome.Name(failure.outcome),
                environment=task.environment,
                cause=failure.detail,
            )
            self._count(held, failure.outcome)
            await self._fail(held, failure.outcome, failure.detail)
            return True
        self._count(held, trajectory.outcome)
        EPISODE_SECONDS.labels(held.lease.episode.task.domain).observe(asyncio.get_running_loop().time() - began)
        return await self._complete(held, trajectory)

    async def _complete(self, held: _Held, trajectory: trajectory_pb2.Trajectory) -> bool:
        """Hand in. True when it was not wanted as it is."""
        request = sample_buffer_pb2.CompleteEpisodeRequest(
            request_id=str(uuid.uuid4()), lease_id=held.lease.lease_id, trajectory=trajectory
        )
        try:
            await self._report(self._completions.hand_in(request, seconds=2 * held.seconds), held)
        except FarmError as refused:
            log.error("trajectory refused", lease_id=held.lease.lease_id, cause=str(refused))
            await self._fail(held, trajectory_pb2.OUTCOME_ABORTED, str(refused))
            return True
        return False

    async def _fail(self, held: _Held, outcome: "trajectory_pb2.Outcome.ValueType", detail: str) -> None:
        request = sample_buffer_pb2.FailEpisodeRequest(
            request_id=str(uuid.uuid4()), lease_id=held.lease.lease_id, outcome=outcome, detail=detail
        )
        await self._report(rpc.call(self._stub.FailEpisode, request, timeout=2 * held.seconds), held)

    async def _report(self, told: Awaitable[Any], held: _Held) -> None:
        """Tell sample_buffer, for as long as it may still remember the lease."""
        try:
            await told
        except LeaseExpired as error:
            log.info("lease expired", lease_id=held.lease.lease_id, cause=str(error))
        except FarmError as error:
            if not _is_outage(error):
                raise
            log.warning("result lost with its lease", lease_id=held.lease.lease_id, cause=str(error))

    async def _heartbeat(self) -> None:
        """Extend every lease each third of the shortest, and cancel what nobody needs."""
        while True:
            if not self._held:
                self._leased.clear()
                await self._leased.wait()
            interval = min(held.seconds for held in self._held.values()) / 3
            await asyncio.sleep(interval)
            if self._held:
                await self._beat(interval)

    async def _beat(self, seconds: float) -> None:
        request = sample_buffer_pb2.HeartbeatRequest(worker_id=self._worker_id, lease_ids=list(self._held))
        try:
            answer = await rpc.call(self._stub.Heartbeat, request, timeout=seconds)
        except FarmError as error:
            if not _is_outage(error):
                raise
            log.warning("no heartbeat", leases=len(self._held), cause=str(error))
            return
        for cancelled in answer.cancelled:
            held = self._held.get(cancelled.lease_id)
            if held is not None and held.task is not None and held.cancelled is None:
                held.cancelled = cancelled
                held.task.cancel()

    async def _give_back(self) -> None:
        """Fail every held lease, so that others can play it at once."""
        if not self._held:
            return
        log.info("giving leases back", leases=len(self._held))
        requests = [
            sample_buffer_pb2.FailEpisodeRequest(
                request_id=str(uuid.uuid4()),
                lease_id=lease_id,
                outcome=trajectory_pb2.OUTCOME_CANCELLED,
                detail="The env_manager that played it was stopped.",
            )
            for lease_id in self._held
        ]
        calls = [rpc.call(self._stub.FailEpisode, request, timeout=GIVE_BACK_SECONDS) for request in requests]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, LeaseExpired):
                log.warning("lease not given back; it expires", cause=str(result))

    def _count(self, held: _Held, outcome: "trajectory_pb2.Outcome.ValueType") -> None:
        EPISODES.labels(held.lease.episode.task.domain, trajectory_pb2.Outcome.Name(outcome)).inc()


def _is_outage(error: FarmError) -> bool:
    """Whether sample_buffer was away, and not the caller wrong."""
    return isinstance(error, DeadlineExceeded) or is_retryable(error)
