"""How every service runs: serve with health and reflection, drain on SIGTERM, and go down with any bug."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

import grpc
import prometheus_client
import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollfarm import rpc, telemetry
from rollfarm.config import EXIT_PORT_IN_USE, Listen
from rollfarm.error_wire import to_status
from rollfarm.errors import FarmError
from rollfarm.imports import end_without_looks

log = structlog.get_logger()

Loop = Callable[[], Awaitable[None]]
Register = Callable[[aio.Server], None]
T = TypeVar("T")

SUPERVISED = "ROLLFARM_SUPERVISED"
"""Set in the environment by a supervisor that holds the other end of the service's stdin for as long as it lives."""

CONNECTION_SECONDS = 60.0
"""How long a connection takes new calls. Its client then looks the name up again, and so finds new replicas."""

POLL_SECONDS = 20.0
"""The longest that a long poll is kept waiting."""

PENDING_CALLS = 100_000
"""Calls that have come and are not looked at yet."""

_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *rpc.MESSAGE_OPTIONS,
    ("grpc.max_connection_age_grace_ms", 2**31 - 1),  # no limit: calls that are open go on to their end
    ("grpc.so_reuseport", 0),
    # A burst waits for its turn: gRPC would cancel calls at random from 1,000 on that are not looked at yet.
    ("grpc.server.max_pending_requests", PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class PortInUse(Exception):
    """The address cannot be listened on."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Sends FarmErrors as statuses, continues the caller's trace and deadline, and times every call."""

    def __init__(self) -> None:
        self._guarded: dict[str, tuple[grpc.RpcMethodHandler[Any, Any], grpc.RpcMethodHandler[Any, Any]]] = {}
        """The latest handler of each method, and what stands in for it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        known, guarded = self._guarded.get(method, (None, handler))
        if known is not handler:
            guarded = _guard(method, handler)
            self._guarded[method] = handler, guarded
        return guarded


def _guard(method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    for kind in ("unary_unary", "stream_unary"):
        if (behaviour := getattr(handler, kind)) is not None:
            return handler._replace(**{kind: _guard_unary(method, behaviour)})  # pyright: ignore
    for kind in ("unary_stream", "stream_stream"):
        if (behaviour := getattr(handler, kind)) is not None:
            return handler._replace(**{kind: _guard_stream(method, behaviour)})  # pyright: ignore
    return handler


def _enter(context: aio.ServicerContext[Any, Any]) -> None:
    """Continue the caller's trace and deadline. Each call has a task of its own, so there is nothing to undo."""
    for name, value in context.invocation_metadata() or ():
        if name == telemetry.TRACE_METADATA:
            telemetry.adopt(str(value))
    rpc.adopt_deadline(context.time_remaining())


def _guard_unary(method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    seconds = _seconds(method)

    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        _enter(context)
        began = time.perf_counter()
        code = "OK"
        try:
            return await behaviour(request, context)
        except FarmError as error:
            code = error.reason
            request = None  # gRPC keeps the frames of what is aborted, in a cycle
            await _abort(context, error.with_traceback(None))
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            seconds(code).observe(time.perf_counter() - began)

    return guarded


def _guard_stream(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    seconds = _seconds(method)

    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        _enter(context)
        began = time.perf_counter()
        code = "OK"
        try:
            async for answer in behaviour(request, context):
                yield answer
        except FarmError as error:
            code = error.reason
            await _abort(context, error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            seconds(code).observe(time.perf_counter() - began)

    return guarded


def _seconds(method: str) -> Callable[[str], prometheus_client.Histogram]:
    """The time of the method's calls by code: looked up once for each code, for that costs as much as to observe."""
    return cache(partial(telemetry.RPC_SECONDS.labels, method))


async def _abort(context: aio.ServicerContext[Any, Any], error: FarmError) -> NoReturn:
    status = to_status(error)
    log.debug("call refused", reason=error.reason, **error.facts)
    await context.abort(status.code, status.details, status.trailing_metadata)  # pyright: ignore
    raise AssertionError("abort returned")


async def serve(
    register: Register,
    listen: Listen,
    *loops: Loop,
    services: Sequence[str],
    stop: asyncio.Event | None = None,
    started: Callable[[int], None] | None = None,
    drains: Sequence[Loop] = (),
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain: finish calls, cancel the loops, return.

    `services` are the full names for health and reflection, `started` is told the port. A loop that raises takes the
    service down with it; the orchestrator restarts it and the leases that it held expire. A loop that returns is done.
    `drains` finish what the loops serve beside gRPC. Raises PortInUse.
    """
    stop = stop or stop_on_signal()
    age = ("grpc.max_connection_age_ms", round(CONNECTION_SECONDS * 1000))
    server = aio.server(interceptors=[ErrorInterceptor()], options=[*_SERVER_OPTIONS, age])
    server.add_registered_method_handlers = _find_by_name  # pyright: ignore[reportAttributeAccessIssue]
    register(server)
    checks = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(listen.address)
    except RuntimeError as error:
        raise PortInUse(f"Cannot listen on {listen.address}.") from error
    await server.start()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(loop)) for loop in loops]
            for name in ("", *services):
                await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
            log.info("serving", address=f"{listen.host}:{port}")
            if started is not None:
                started(port)
            await stop.wait()
            log.info("draining", seconds=listen.drain_seconds)
            await checks.enter_graceful_shutdown()
            await asyncio.gather(server.stop(grace=listen.drain_seconds), *(_run(drain) for drain in drains))
            for task in tasks:
                task.cancel()
    finally:
        await server.stop(grace=None)


def _find_by_name(_service: str, _handlers: object) -> None:
    """What generated code does for speed, left undone: the server finds these methods by name, as it does any other.

    For registered methods, `grpc.aio` sets up a wait for the next call of each of them anew at every call. With 18
    methods that is a tenth of what a call costs.
    """


async def _run(loop: Loop) -> None:
    await loop()


def run(main: Callable[[], Awaitable[None]], *, port_flag: str = "--port", quick: bool = False) -> NoReturn:
    """Run a service's main and exit: 0 after a drain, 3 when the port is taken, 1 with a traceback for a bug.

    `port_flag` is what the service's command line calls its port. `quick` runs it on uvloop where that is installed,
    which saves a seventh of what a call costs.
    """
    try:
        with asyncio.Runner(loop_factory=_quick_loop() if quick else None) as runner:
            runner.run(_run(main))
    except PortInUse as error:
        print(f"{error} Stop what uses the port, or choose another with {port_flag}.", file=sys.stderr)
        raise SystemExit(EXIT_PORT_IN_USE) from None
    finally:
        end_without_looks()
    raise SystemExit(0)


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes loops of uvloop; None where it is not installed, as where it does not run."""
    return import_module("uvloop").new_event_loop if find_spec("uvloop") else None


def calm_collector(*, young: int = 5_000, looks: int = 1_000) -> None:
    """Look for cycles among young objects, and hardly ever among all. For a service that holds much, once it is wired.

    Its state has no cycles, and a look at everything that 10,000 samples leave behind holds each call up for 60 ms.
    Where others' code may leave cycles, `looks` is smaller: looks at those that are not so young, for one at all.
    `young` is the number of objects that are looked at together; where it is large, cycles must be small.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, 20, looks)


def stop_on_signal() -> asyncio.Event:
    """Set at SIGTERM or SIGINT, and when the supervisor is gone. For a service with work to finish before it drains."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if os.environ.get(SUPERVISED):
        _stop_with_supervisor(loop, stop)
    return stop


def _stop_with_supervisor(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Treat the end of stdin like SIGTERM, so that a supervisor that dies leaves no orphans."""
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop.set()

    loop.add_reader(stdin, read)


class Bell:
    """Wakes the one task that waits for it, if it does: an `asyncio.Event` for one, without a memory."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def rung(self) -> None:
        """Until it rings the next time."""
        assert self._waiting is None or self._waiting.done()
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting


class Changed:
    """Wakes long polls when state changes, the one that has waited longest first."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Event, None] = {}

    def notify(self) -> None:
        """Let every waiter look again."""
        for waiter in self._waiters:
            waiter.set()

    async def first(self, ready: Callable[[], T | None], seconds: float) -> T | None:
        """The first non-None `ready()`, tried now and at every change; None after `seconds`."""
        woken = asyncio.Event()
        self._waiters[woken] = None
        try:
            async with asyncio.timeout(seconds):
                while (value := ready()) is None:
                    await woken.wait()
                    woken.clear()
                return value
        except TimeoutError:
            return None
        finally:
            del self._waiters[woken]


def poll_seconds(context: aio.ServicerContext[Any, Any], *, most: float = POLL_SECONDS, margin: float = 0.2) -> float:
    """How long a long poll may wait: until just before the caller's deadline, and no longer than `most`."""
    left = context.time_remaining()
    return most if left is None else max(0.0, min(most, left - margin))
