"""The engines behind the router: one connection for each address, and the loop turn that carries out what routing says.

Every transition of the router is followed by `Fleet.wake`, and what all of them asked for is carried out at the end of
the loop turn; or by `Fleet.flush`, where many came in one message and nothing is gained by waiting. Invariant: a
connection that ends has told the router.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from google.protobuf.message import Message
from grpc import aio

from llm_proxy.config import LlmProxyConfig
from llm_proxy.pool import SERVING, SUSPENDED
from llm_proxy.requests import ABORT, EngineMisbehaved
from llm_proxy.routing import Effects, Router
from rollfarm import rpc
from rollfarm.error_wire import from_rpc
from rollfarm.errors import EngineFailed, FarmError
from rollfarm.service import Bell, Changed
from rollfarm.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger()

FIRST_RECONNECT_SECONDS = 0.05

_SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name


class Fleet:
    """Every engine, with its connection. `run` must run for anything to happen."""

    def __init__(self, config: LlmProxyConfig) -> None:
        self.config = config
        self.router = Router(config.routing)
        self.changed = Changed()
        """Notified when the router's revision grows."""

        self.progressed = Changed()
        """Notified at the end of a loop turn in which anything was to be done."""

        self._connections: dict[str, Connection] = {}
        self._group: asyncio.TaskGroup | None = None
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline: float | None = None
        self._seen_revision = 0
        self._suspended: set[str] = set()
        """Engines, as of that revision."""

        self._bug: asyncio.Future[None] | None = None
        for address in config.engines:
            self.attach(address)

    async def run(self) -> None:
        """Keep a connection to every engine until cancelled. A bug in what a loop turn does is raised here."""
        self._bug = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as self._group:
            for connection in self._connections.values():
                connection.start(self._group)
            try:
                await self._bug
            finally:
                for connection in self._connections.values():
                    connection.stop()

    def attach(self, address: str) -> str:
        """Add an engine, or keep one that drains; its address is its id. Idempotent."""
        self.router.attach(address, address)
        if address not in self._connections:
            self._connections[address] = Connection(address, self)
            if self._group is not None:
                self._connections[address].start(self._group)
        if self._group is not None:
            self.wake()
        return address

    def detach(self, engine_id: str) -> None:
        """Remove an engine; its requests continue elsewhere. Raises UnknownEngine."""
        self.router.detach(engine_id, time.monotonic())
        self._connections.pop(engine_id).stop()
        self.wake()

    def drain(self, engine_id: str) -> None:
        """Give an engine nothing more, and remove it when it has nothing left. Raises UnknownEngine."""
        self.router.drain(engine_id)
        self.wake()

    def find(self, engine_id: str) -> "Connection | None":
        """The engine's connection, if it is still attached."""
        return self._connections.get(engine_id)

    def connection(self, engine_id: str) -> "Connection":
        """Raises UnknownEngine."""
        self.router.engine(engine_id)
        return self._connections[engine_id]

    def wake(self) -> None:
        """Carry out what the router says, at the end of this loop turn."""
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._unless_bug, self._end_turn)

    def flush(self) -> None:
        """Give out what waits and answer what is done now, since nothing more comes with it; the rest, as `wake`."""
        self._unless_bug(self._hand_out)
        self.wake()

    def _unless_bug(self, act: Callable[[float], None]) -> None:
        """Act now. A bug ends the fleet."""
        try:
            act(time.monotonic())
        except Exception as bug:  # what was asked for may be half done
            if self._bug is None or self._bug.done():
                raise
            self._bug.set_exception(bug)

    def _hand_out(self, now: float) -> None:
        self._carry_out(self.router.hand_out(now))

    def _end_turn(self, now: float) -> None:
        self._is_woken = False
        self._carry_out(self.router.step(now))
        self._set_timer(now)
        if self.router.revision != self._seen_revision:
            self._seen_revision = self.router.revision
            self._say_who_is_suspended()
            self.changed.notify()
        self.progressed.notify()

    def _carry_out(self, effects: Effects) -> None:
        for engine_id, generations in effects.sends.items():
            self._connections[engine_id].send(generations)
        for engine_id, wire_ids in effects.cancels.items():
            if (connection := self._connections.get(engine_id)) is not None:
                connection.cancel(wire_ids)
        for waiter, request in effects.answers:
            waiter.answer(request)
        for engine_id in effects.left:
            self._connections.pop(engine_id).stop()

    def _say_who_is_suspended(self) -> None:
        engines = self.router.engines
        before, self._suspended = self._suspended, {each.engine_id for each in engines if each.state == SUSPENDED}
        for engine in engines:
            if engine.engine_id in self._suspended - before:
                log.warning("engine suspended", engine_id=engine.engine_id, cause=engine.detail)
            elif engine.engine_id in before - self._suspended and engine.state == SERVING:
                log.info("engine serves again", engine_id=engine.engine_id)

    def _set_timer(self, now: float) -> None:
        """Wake when time alone changes something."""
        deadline = self.router.next_deadline
        if deadline == self._timer_deadline and (deadline is None or deadline > now):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_deadline = None, deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now), self._ring)

    def _ring(self) -> None:
        """The timer is spent: uvloop's may be early by a millisecond, and is set again then."""
        self._timer = self._timer_deadline = None
        self.wake()


class Connection:
    """One engine host: reached, watched, fed and, when it fails, reached again."""

    def __init__(self, address: str, fleet: Fleet) -> None:
        self._address = address
        self._fleet = fleet
        self._router = fleet.router
        self._config = fleet.config
        self._stub: Any = None
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._outbox: list[engine_pb2.Generation] = []
        self._outbox_filled = Bell()
        self._cancels: list[str] = []
        self._cancels_filled = asyncio.Event()
        self._gave_up: asyncio.Future[None] | None = None
        self._updating = 0
        self._updates = 0

    def start(self, group: asyncio.TaskGroup) -> None:
        self._task = group.create_task(self._run(), name=f"engine {self._address}", context=rpc.detached())

    def stop(self) -> None:
        """End the connection; nothing that the engine still says counts.

        The flag is needed beside the cancellation: one that coincides with a failure arrives as the failure alone.
        """
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    def send(self, generations: list[engine_pb2.Generation]) -> None:
        """Give the engine work, in order."""
        self._outbox += generations
        self._outbox_filled.ring()

    def cancel(self, wire_ids: list[str]) -> None:
        """Tell the engine to stop these; it never hears of those that were not sent yet."""
        unsent = {generation.request_id for generation in self._outbox}.intersection(wire_ids)
        if unsent:
            self._outbox = [generation for generation in self._outbox if generation.request_id not in unsent]
            for wire_id in unsent:
                aborted = engine_pb2.GenerationChunk(request_id=wire_id, finish_reason=ABORT)
                self._router.receive(self._address, aborted, time.monotonic())
            self._fleet.wake()
        self._cancels += [wire_id for wire_id in wire_ids if wire_id not in unsent]
        self._cancels_filled.set()

    def give_up(self, detail: str) -> None:
        """Drop the connection and make a new one; nobody knows what the engine does."""
        if self._gave_up is not None and not self._gave_up.done():
            self._gave_up.set_exception(EngineFailed(detail))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """What the engine says of its version meanwhile does not count: all engines change together."""
        self._updating += 1
        try:
            yield
        finally:
            self._updating -= 1
            self._updates += 1

    def check_reached(self) -> None:
        """Raises EngineFailed while the engine cannot be reached."""
        engine = self._router.engine(self._address)
        if self._stub is None:
            raise EngineFailed(f"Engine {self._address} cannot be reached: {engine.detail}.", engine_id=self._address)

    async def ask(self, method: str, request: Message, *, timeout: float) -> Any:
        """Call the engine once. Raises the engine's error, or EngineFailed when the connection breaks meanwhile."""
        self.check_reached()
        try:
            return await rpc.call(getattr(self._stub, method), request, timeout=timeout, retry=False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Closing the channel cancels its calls, not the task that waits for one.
            raise EngineFailed(f"Engine {self._address} was lost during {method}.", engine_id=self._address) from None

    async def look(self) -> None:
        """Learn now how the engine is. Raises as `ask` does."""
        updates = self._updates
        status = await self.ask(
            "GetStatus", engine_pb2.EngineServiceGetStatusRequest(), timeout=self._config.health_timeout_seconds
        )
        self._take(status, updates)

    def _take(self, status: engine_pb2.EngineServiceGetStatusResponse, updates: int) -> None:
        """What the engine said of itself, asked for after so many updates."""
        if not self._updating and updates == self._updates:
            self._router.reported(self._address, status, time.monotonic())
            self._fleet.wake()

    async def _run(self) -> None:
        backoff = FIRST_RECONNECT_SECONDS
        while True:
            was_reached = False
            try:
                async with rpc.channel(self._address, spread=False) as channel:
                    stub = engine_pb2_grpc.EngineServiceStub(channel)
                    status = await self._status(stub)
                    was_reached = True
                    await self._serve(stub, _generate(channel), status)
            except* (FarmError, aio.AioRpcError, EngineMisbehaved) as failures:
                detail = "; ".join(_describe(failure) for failure in _leaves(failures))
            else:
                detail = "the engine ended the stream"
            self._stub = None
            if self._stopped:
                return
            if was_reached:
                backoff = FIRST_RECONNECT_SECONDS
                log.warning("engine lost", engine_id=self._address, cause=detail)
            self._router.lost(self._address, detail, time.monotonic())
            self._fleet.wake()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._config.reconnect_seconds)

    async def _serve(self, stub: Any, generate: Any, status: engine_pb2.EngineServiceGetStatusResponse) -> None:
        """Exchange generations and chunks until something fails."""
        self._outbox, self._cancels = [], []
        self._gave_up = asyncio.get_running_loop().create_future()
        call = generate(metadata=rpc.metadata())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(call))
                group.create_task(self._write(call))
                group.create_task(self._write_cancels(stub))
                group.create_task(self._watch(stub, status.instance_id))
                group.create_task(_wait(self._gave_up))
                self._stub = stub
                self._router.connected(self._address, status, time.monotonic())
                log.info("engine reached", engine_id=self._address, policy_version=status.policy_version)
                self._fleet.wake()
        finally:
            call.cancel()

    async def _read(self, call: Any) -> None:
        async for message in call:
            if message is None:  # gRPC's way to say that it could not parse
                raise EngineFailed("the engine sends no valid message")
            now = time.monotonic()
            for chunk in message.chunks:
                self._router.receive(self._address, chunk, now)
            self._fleet.flush()
        raise EngineFailed("the engine ended the stream")

    async def _write(self, call: Any) -> None:
        pace = rpc.Pace()
        while True:
            while not self._outbox:
                await self._outbox_filled.rung()
            await pace.wait()
            generations, self._outbox = self._outbox, []
            pace.sent(len(generations))
            for request in rpc.fitted(_generate_request, len, generations):
                try:
                    await call.write(request)
                except asyncio.InvalidStateError:
                    raise EngineFailed("the engine ended the stream") from None

    async def _write_cancels(self, stub: Any) -> None:
        while True:
            await self._cancels_filled.wait()
            self._cancels_filled.clear()
            wire_ids, self._cancels = self._cancels, []
            if wire_ids:
                request = engine_pb2.EngineServiceCancelRequest(request_ids=wire_ids)
                await rpc.call(stub.Cancel, request, timeout=self._config.health_timeout_seconds, retry=False)

    async def _watch(self, stub: Any, instance_id: str) -> None:
        """Notice an engine that hangs, restarts or changes, and cancel again what it may have missed."""
        while True:
            await asyncio.sleep(self._config.health_seconds)
            updates = self._updates
            status = await self._status(stub)
            if status.instance_id != instance_id:
                raise EngineFailed("the engine was restarted")
            self._take(status, updates)
            if missed := self._router.unconfirmed_cancels(self._address):
                self.cancel(missed)

    async def _status(self, stub: Any) -> engine_pb2.EngineServiceGetStatusResponse:
        timeout = self._config.health_timeout_seconds
        return await rpc.call(stub.GetStatus, engine_pb2.EngineServiceGetStatusRequest(), timeout=timeout, retry=False)


def _generate(channel: aio.Channel) -> Any:
    """EngineService.Generate, whose requests are given serialised."""
    return channel.stream_stream(
        f"/{_SERVICE}/Generate", response_deserializer=engine_pb2.EngineServiceGenerateResponse.FromString
    )


def _generate_request(generations: list[engine_pb2.Generation]) -> bytes:
    request = engine_pb2.EngineServiceGenerateRequest()
    for generation in generations:
        request.generations.add().CopyFrom(generation)  # at half the cost of a list for the constructor
    return request.SerializeToString()


async def _wait(future: "asyncio.Future[None]") -> None:
    await future


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _describe(failure: BaseException) -> str:
    if isinstance(failure, aio.AioRpcError):
        failure = from_rpc(failure)
    if isinstance(failure, FarmError):
        return failure.problem.rstrip(".")
    return str(failure)
