"""Holds leases: takes one for each free slot, stops those that nobody needs, hands in what came of the others.

A lease is in `_held` from the moment it is taken until sample_buffer knows its end, or needs it no more. Every one that
is still held when the worker stops is given back.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import prometheus_client
import structlog

from env_manager.completions import Completions
from env_manager.episodes import EpisodeFailed
from env_manager.heartbeats import Heartbeats, is_outage, unless
from env_manager.slots import Slots
from env_manager.standings import Standing, Standings
from rollfarm import rpc, telemetry
from rollfarm.errors import FarmError, LeaseExpired
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
HELD = prometheus_client.Gauge("rollfarm_env_manager_held_leases", "Episodes played, scored or handed in.")

Play = Callable[[sample_buffer_pb2.EpisodeLease, Callable[[], None]], Awaitable[trajectory_pb2.Trajectory]]


@dataclass(eq=False)
class _Held:
    lease: sample_buffer_pb2.EpisodeLease
    standing: Standing
    is_probe: bool
    task: asyncio.Task[None] | None = None
    cancelled: sample_buffer_pb2.CancelledLease | None = None
    is_playing: bool = True
    """It has a slot."""

    is_over: bool = False
    """sample_buffer is being told of its end; cancelling it would save nobody anything."""

    @property
    def seconds(self) -> float:
        return self.lease.lease_duration.ToNanoseconds() / 1e9


class Worker:
    """Plays leased episodes, as many at once as there are slots.

    An episode that is only being scored has no slot: its reward may wait for siblings, which need slots to be played.
    How many are scored at once is bounded all the same, by sample_buffer's credits.
    """

    def __init__(
        self,
        stub: Any,
        play: Play,
        *,
        worker_id: str,
        slots: Slots,
        standings: Standings,
        environments: Sequence[str] = (),
    ) -> None:
        """`stub` is a SampleBufferServiceStub on an aio channel. No `environments` asks for any."""
        self._stub = stub
        self._completions = Completions(stub)
        self._play = play
        self._worker_id = worker_id
        self._environments = environments
        self._slots = slots
        self._standings = standings
        self._held: dict[str, _Held] = {}
        self._leases: dict[str, sample_buffer_pb2.EpisodeLease] = {}
        """Of those held, the ones to keep alive."""
        self._heartbeats = Heartbeats(stub, self._leases, self._cancel, worker_id=worker_id)
        self._suspended: asyncio.Queue[Standing] = asyncio.Queue()
        self._changed = asyncio.Event()
        """Set when it changed which environments are suspended."""
        HELD.set_function(lambda: len(self._held))

    async def run(self) -> None:
        """Lease and play until cancelled, then give back what is unfinished."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heartbeats.run())
            group.create_task(self._completions.run())
            group.create_task(self._probe_suspended(group))
            try:
                await self._lease(group)
            finally:  # before the episodes end, which takes as long as the slowest environment takes to close
                await self._give_back()

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        while True:
            for lease in await self._ask(await self._slots.free(), self._environments):
                self._begin(group, lease)

    async def _probe_suspended(self, group: asyncio.TaskGroup) -> None:
        while True:
            standing = await self._suspended.get()
            group.create_task(self._probe(group, standing), name=f"probe-{standing.name}")

    async def _probe(self, group: asyncio.TaskGroup, standing: Standing) -> None:
        """Play one episode after each suspension, until one comes to its end. It is played beside the slots."""
        while standing.breaker.is_open:
            await asyncio.sleep(standing.breaker.reopens_at - asyncio.get_running_loop().time())
            for lease in await self._ask(1, [standing.name], is_probe=True):
                await asyncio.wait([self._begin(group, lease, is_probe=True)])

    async def _ask(
        self, count: int, environments: Sequence[str], *, is_probe: bool = False
    ) -> Sequence[sample_buffer_pb2.EpisodeLease]:
        """Wait for leases. The same question is asked until it is answered, so that no answer is lost."""
        request = sample_buffer_pb2.LeaseEpisodesRequest(
            request_id=str(uuid.uuid4()), worker_id=self._worker_id, max_leases=count, environments=environments
        )
        while True:
            self._changed.clear()
            request.excluded_environments[:] = [] if is_probe else self._standings.suspended
            leases = await unless(self._changed, self._leased(request))
            if leases is not None:
                return leases

    async def _leased(
        self, request: sample_buffer_pb2.LeaseEpisodesRequest
    ) -> Sequence[sample_buffer_pb2.EpisodeLease] | None:
        """What sample_buffer answers, perhaps nothing. None when it is away."""
        try:
            answer = await rpc.call(self._stub.LeaseEpisodes, request, timeout=POLL_SECONDS)
        except FarmError as error:
            if not is_outage(error):
                raise
            log.warning("no leases", cause=str(error))
            return None
        return [lease for lease in answer.leases if lease.lease_id not in self._held]

    def _begin(
        self, group: asyncio.TaskGroup, lease: sample_buffer_pb2.EpisodeLease, *, is_probe: bool = False
    ) -> asyncio.Task[None]:
        standing = self._standings.of(lease.episode.task.environment)
        held = self._held[lease.lease_id] = _Held(lease, standing, is_probe)
        self._leases[lease.lease_id] = lease
        self._slots.take()
        standing.running += 1
        self._heartbeats.taken()
        held.task = group.create_task(self._hold(held), name=f"episode-{lease.lease_id}")
        return held.task

    async def _hold(self, held: _Held) -> None:
        """Play one episode and hand it in. A cancellation by anyone but `_cancel` leaves it held."""
        telemetry.begin_trace()
        try:
            failed = await self._settle(held)
        except asyncio.CancelledError:
            if held.cancelled is None:
                raise
            outcome = trajectory_pb2.Outcome.Name(held.cancelled.outcome)
            log.debug("episode cancelled", lease_id=held.lease.lease_id, outcome=outcome, cause=held.cancelled.detail)
            self._count(held, held.cancelled.outcome)
            failed = False
        del self._held[held.lease.lease_id]
        self._leases.pop(held.lease.lease_id, None)
        if failed:
            await asyncio.sleep(REST_SECONDS)
        self._played(held)

    def _to_be_scored(self, held: _Held) -> None:
        """Its environment has played it to the end."""
        self._played(held)
        if held.standing.played(is_probe=held.is_probe):
            self._changed.set()

    def _played(self, held: _Held) -> None:
        """Its slot is free, if it is not already."""
        if held.is_playing:
            held.is_playing = False
            held.standing.running -= 1
            self._slots.give()

    def _cancel(self, cancelled: sample_buffer_pb2.CancelledLease) -> None:
        held = self._held.get(cancelled.lease_id)
        if held is not None and held.task is not None and held.cancelled is None and not held.is_over:
            held.cancelled = cancelled
            held.task.cancel()
            del self._leases[cancelled.lease_id]

    async def _settle(self, held: _Held) -> bool:
        """Play and report. True when the episode failed."""
        began = asyncio.get_running_loop().time()
        try:
            trajectory = await self._play(held.lease, lambda: self._to_be_scored(held))
        except EpisodeFailed as failure:
            task = held.lease.episode.task
            log.warning(
                "episode failed",
                lease_id=held.lease.lease_id,
                outcome=trajectory_pb2.Outcome.Name(failure.outcome),
                environment=task.environment,
                cause=failure.detail,
            )
            self._count(held, failure.outcome, failure.detail)
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
            if not is_outage(error):
                raise
            log.warning("result lost with its lease", lease_id=held.lease.lease_id, cause=str(error))

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

    def _count(self, held: _Held, outcome: "trajectory_pb2.Outcome.ValueType", cause: str = "") -> None:
        held.is_over = True
        EPISODES.labels(held.lease.episode.task.domain, trajectory_pb2.Outcome.Name(outcome)).inc()
        now = asyncio.get_running_loop().time()
        if held.standing.count(outcome, cause, now, is_probe=held.is_probe):
            self._changed.set()
            self._suspended.put_nowait(held.standing)
