"""Engines that sleep while a trainer computes on their devices.

What is wanted holds for every engine that is reached, also for one that joins or restarts meanwhile: `run` tells each
for itself, so one that hangs delays no other. The wish is a lease, because whoever asked may die; then the engines are
woken. Invariant: an engine that was told to sleep here, whether or not it answered, is woken as soon as it is reached
and no sleep is wanted.
"""

import asyncio
import time

import structlog

from llm_proxy.engines import Connection, Fleet
from llm_proxy.pool import EngineState
from rollfarm.errors import FarmError, Unsupported
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

log = structlog.get_logger()

LEASE_SECONDS = 60.0
"""Where the caller does not say."""

_LONG_SECONDS = 3600.0


class Sleeping:
    """The sleep of one fleet. Nothing happens unless `run` runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._router = fleet.router
        self._seconds = fleet.config.apply_timeout_seconds
        self._wanted: llm_proxy_pb2.SleepEnginesRequest | None = None
        self._until = 0.0
        """When what is wanted ends, monotonic."""

        self._asleep: dict[str, bool | None] = {}
        """By instance: whether it sleeps; None where it was told something and has not answered. Others are awake."""

        self._refusals: dict[str, Unsupported] = {}
        """By instance: why it cannot sleep."""

        self._being_told: set[str] = set()

    async def sleep(self, request: llm_proxy_pb2.SleepEnginesRequest) -> llm_proxy_pb2.SleepEnginesResponse:
        """Put every engine to sleep, or renew the lease. Raises Unsupported, and then wakes whom it put to sleep."""
        is_renewal = self._wanted is not None
        seconds = request.lease_duration.ToTimedelta().total_seconds() or LEASE_SECONDS
        self._wanted, self._until = request, time.monotonic() + seconds
        await self._settled()
        for engine in self._reached():
            if refusal := self._refusals.get(engine.status.instance_id):
                if not is_renewal:
                    self._wanted = None
                    await self._settled()
                raise refusal
        return llm_proxy_pb2.SleepEnginesResponse(engine_ids=self._where(sleeping=True))

    async def wake(self) -> llm_proxy_pb2.WakeEnginesResponse:
        """Wake every engine that sleeps, whoever put it to sleep."""
        self._wanted = None
        self._asleep |= {each.status.instance_id: True for each in self._reached() if each.status.sleeping}
        await self._settled()
        return llm_proxy_pb2.WakeEnginesResponse(engine_ids=self._where(sleeping=False))

    async def run(self) -> None:
        """Tell the engines, and end the lease, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for engine in self._to_tell():
                    self._being_told.add(engine.engine_id)
                    group.create_task(self._tell(engine, self._wanted), name=f"sleep {engine.engine_id}")
                left = max(0.0, self._until - time.monotonic()) if self._wanted else _LONG_SECONDS
                await self._fleet.changed.first(lambda: True if self._to_tell() else None, left)
                if self._wanted and time.monotonic() >= self._until:
                    log.warning("nobody renewed the sleep of the engines: they are woken")
                    self._wanted = None

    async def _settled(self) -> None:
        """Wait until every engine that is reached does as is wanted, and each of the others was tried once."""
        self._fleet.changed.notify()
        await self._fleet.changed.first(lambda: None if self._is_busy() else True, _LONG_SECONDS)

    def _is_busy(self) -> bool:
        """Whether an engine is being told something, or will be, or nobody knows yet whether it is there."""
        return bool(self._untold()) or any(
            engine.is_untried or (engine.is_reached and engine.engine_id in self._being_told)
            for engine in self._router.engines
        )

    def _untold(self) -> list[EngineState]:
        """Engines that are reached and do not do as is wanted, though they can."""
        wanted = self._wanted is not None
        return [
            engine
            for engine in self._reached()
            if self._asleep.get(engine.status.instance_id, False) is not wanted
            and engine.status.instance_id not in self._refusals
        ]

    def _to_tell(self) -> list[EngineState]:
        return [engine for engine in self._untold() if engine.engine_id not in self._being_told]

    async def _tell(self, engine: EngineState, wanted: llm_proxy_pb2.SleepEnginesRequest | None) -> None:
        """Give the engine no requests, and put it to sleep or wake it. One that fails is reached anew and told then."""
        instance_id, connection = engine.status.instance_id, self._fleet.find(engine.engine_id)
        self._router.hold(engine.engine_id)
        self._asleep[instance_id] = None
        try:
            if connection is not None:
                await (self._wake(connection) if wanted is None else self._put_to_sleep(connection, engine, wanted))
            self._asleep[instance_id] = wanted is not None
        except Unsupported as refusal:
            log.error("an engine cannot sleep", engine_id=engine.engine_id, cause=str(refusal))
            self._asleep[instance_id] = False
            self._refusals[instance_id] = refusal
        except FarmError as error:
            if connection is not None:
                connection.give_up(f"it did not {'wake up' if wanted is None else 'fall asleep'}: {error.problem}")
                await asyncio.sleep(self._fleet.config.health_seconds)
        finally:
            self._router.release(engine.engine_id, time.monotonic())
            self._being_told.discard(engine.engine_id)
            self._fleet.wake()
            self._fleet.changed.notify()

    async def _put_to_sleep(
        self, connection: Connection, engine: EngineState, wanted: llm_proxy_pb2.SleepEnginesRequest
    ) -> None:
        drain_seconds = wanted.drain_duration.ToTimedelta().total_seconds()
        await self._fleet.progressed.first(lambda: None if engine.attempts else True, drain_seconds)
        request = engine_pb2.SleepRequest(discard_weights=wanted.discard_weights)
        await connection.ask("Sleep", request, timeout=self._seconds)
        await connection.look()

    async def _wake(self, connection: Connection) -> None:
        await connection.ask("WakeUp", engine_pb2.WakeUpRequest(), timeout=self._seconds)
        await connection.look()

    def _reached(self) -> list[EngineState]:
        return [engine for engine in self._router.engines if engine.is_reached]

    def _where(self, *, sleeping: bool) -> list[str]:
        return [engine.engine_id for engine in self._reached() if engine.status.sleeping is sleeping]
