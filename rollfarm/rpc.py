"""Calls between services: channels, deadlines that are passed on, and retries of what is safe to retry."""

import asyncio
import contextvars
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2

from rollfarm import telemetry
from rollfarm.error_wire import from_rpc
from rollfarm.errors import DeadlineExceeded, FarmError, InvalidAnswer, is_retryable

M = TypeVar("M", bound=Message)
T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either end takes. Bigger things are streamed in pieces of 1 to 4 MiB."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Pieces in which a large answer is streamed."""

PAUSE_SECONDS = 0.001
"""What each piece in a message delays the next message of a busy stream."""

MOST_PAUSE_SECONDS = 0.004
"""The longest such delay: little beside an engine's step, which takes 10 to 30 ms."""

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0

MESSAGE_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *MESSAGE_OPTIONS,
    # A connection of its own: one that it shared might rest after a failure of somebody else's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("deadline", default=None)


def channel(address: str, *, spread: bool = True) -> aio.Channel:
    """A channel to host:port or dns:///name:port, spread round-robin over what the name resolves to, or else to one.

    Use with `async with`, or close it.
    """
    policy = json.dumps({"loadBalancingConfig": [{"round_robin" if spread else "pick_first": {}}]})
    return aio.insecure_channel(address, options=[*_CHANNEL_OPTIONS, ("grpc.service_config", policy)])


def adopt_deadline(seconds: float | None) -> None:
    """Bound every `call` of this asyncio task, and of those that it starts, to `seconds` from now; None unbinds it."""
    _deadline.set(None if seconds is None else time.monotonic() + seconds)


def detached() -> contextvars.Context:
    """A context for a task that outlives the call which starts it: it keeps the trace and not the deadline."""
    context = contextvars.copy_context()
    context.run(adopt_deadline, None)
    return context


def remaining(timeout: float) -> float:
    """`timeout`, or what the adopted deadline leaves of it."""
    at = _deadline.get()
    return timeout if at is None else min(timeout, at - time.monotonic())


def metadata() -> tuple[tuple[str, str], ...]:
    """What every call carries: the trace."""
    return ((telemetry.TRACE_METADATA, telemetry.traceparent()),)


async def call(method: Callable[..., Any], request: Any, *, timeout: float, retry: bool = True) -> Any:
    """Call `method` until it answers, within `timeout` seconds and any adopted deadline.

    With `retry`, UNAVAILABLE (the service restarts, or its journal is away) is tried again with jittered backoff;
    every call of the contract is idempotent. Raises the FarmError that the server raised, or Unavailable or
    DeadlineExceeded.
    """
    end = time.monotonic() + remaining(timeout)
    backoff = FIRST_RETRY_SECONDS
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"No answer to {_name(method)} in {timeout:g} s.", method=_name(method), seconds=timeout
            )
        try:
            answer = await method(request, timeout=left, metadata=metadata(), wait_for_ready=retry)
            if answer is None:  # gRPC's way to say that it could not parse
                problem = f"The answer to {_name(method)} is no valid message."
                raise InvalidAnswer(problem, method=_name(method))
            return answer
        except aio.AioRpcError as refused:
            # Not kept in a variable: the error has this frame in its traceback, and the frame the request.
            if not (retry and is_retryable(from_rpc(refused))) or time.monotonic() + backoff >= end:
                raise from_rpc(refused) from None
        await asyncio.sleep(backoff * random.uniform(0.5, 1))
        backoff = min(2 * backoff, LAST_RETRY_SECONDS)


async def stream(method: Callable[..., Any], request: Any, *, timeout: float) -> AsyncIterator[Any]:
    """The answers of a server-streaming call, not retried. Raises as `call` does."""
    try:
        async for answer in method(request, timeout=remaining(timeout), metadata=metadata(), wait_for_ready=True):
            yield answer
    except aio.AioRpcError as refused:
        raise from_rpc(refused) from None


def portions(messages: Iterable[M], most_bytes: int = CHUNK_BYTES, most: int = 0) -> Iterator[list[M]]:
    """The messages in order, in lists of about `most_bytes` at most; a larger one is a list of its own.

    `most` bounds the messages in a list; 0 does not.
    """
    portion: list[M] = []
    size = 0
    for message in messages:
        more = message.ByteSize()
        if portion and (size + more > most_bytes or len(portion) == most):
            yield portion
            portion, size = [], 0
        portion.append(message)
        size += more
    if portion:
        yield portion


def fitted(
    make: Callable[[list[M]], T], size: Callable[[T], int], messages: list[M], *, most_bytes: int = CHUNK_BYTES
) -> Iterator[T]:
    """What `make` makes of the messages, in order: if that is larger than `most_bytes`, of each half of them instead.

    Where most of them fit, this is cheaper than to look how large each message is, as `portions` does.
    """
    made = make(messages)
    if len(messages) > 1 and size(made) > most_bytes:
        half = len(messages) // 2
        yield from fitted(make, size, messages[:half], most_bytes=most_bytes)
        yield from fitted(make, size, messages[half:], most_bytes=most_bytes)
    elif messages:
        yield made


class Pace:
    """Keeps the messages of a stream apart, since one costs as much CPU as several of the pieces in it.

    A message delays the next one by what it carried. So fewer than a thousand pieces a second travel as they come, most
    of them alone, and more of them together.
    """

    def __init__(self) -> None:
        self._next_at = 0.0

    async def wait(self) -> None:
        """Until the next message may be sent."""
        if (early := self._next_at - time.monotonic()) > 0:
            await asyncio.sleep(early)

    def sent(self, count: int) -> None:
        """A message of this many pieces is sent now."""
        self._next_at = time.monotonic() + min(count * PAUSE_SECONDS, MOST_PAUSE_SECONDS)


def _name(method: Callable[..., Any]) -> str:
    path = getattr(method, "_method", b"call")
    return path.decode() if isinstance(path, bytes) else str(path)


async def is_serving(address: str, *, timeout: float) -> bool:
    """Whether the server at `address` answers its health check within `timeout` seconds."""
    async with channel(address) as connection:
        check = connection.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await call(check, health_pb2.HealthCheckRequest(), timeout=timeout, retry=False)
        except FarmError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING
