"""Dials in to env_manager and plays what it asks for: for a worker that env_manager cannot dial.

One stream carries every episode. When it breaks, env_manager fails them, so the worker closes them and dials again.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import structlog
from grpc import aio

from rollfarm import rpc
from rollfarm.env import MAX_SESSIONS, Kind
from rollfarm.env_server import EnvironmentServicer
from rollfarm.error_wire import from_rpc, to_failure
from rollfarm.errors import EnvironmentFailed, FarmError, InvalidArgument, Unavailable, WrongToken
from rollfarm.v1.environment_pb2 import AttachRequest, AttachResponse
from rollfarm.v1.environment_pb2_grpc import EnvManagerServiceStub

log = structlog.get_logger()

E = TypeVar("E", bound=BaseException)

FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 10.0

DRAIN_SECONDS = 5.0
"""How long the calls that are being answered may take when the worker stops."""

GOODBYE_SECONDS = 1.0
"""How long env_manager may take to end the stream then."""

ENVELOPE_BYTES = 1024
"""What the stream adds to an answer, at most."""


async def attach(
    kinds: Sequence[Kind], address: str, stop: asyncio.Event, *, token: str = "", max_sessions: int = MAX_SESSIONS
) -> None:
    """Play for the env_manager at `address` until `stop`; dial again whenever the stream breaks.

    Raises WrongToken and InvalidArgument, which no waiting mends.
    """
    backoff = FIRST_BACKOFF_SECONDS
    while not stop.is_set():
        began = time.monotonic()
        try:
            await _Stream(kinds, max_sessions).carry(address, token, stop)
        except (WrongToken, InvalidArgument):
            raise
        except FarmError as error:
            if stop.is_set():
                return
            log.warning("not attached to env_manager", address=address, cause=str(error))
        if time.monotonic() - began > LAST_BACKOFF_SECONDS:
            backoff = FIRST_BACKOFF_SECONDS
        try:
            async with asyncio.timeout(backoff * random.uniform(0.5, 1)):
                await stop.wait()
        except TimeoutError:
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)


class _Stream:
    """One stream and the episodes that it carries."""

    def __init__(self, kinds: Sequence[Kind], max_sessions: int) -> None:
        self._servicer = EnvironmentServicer(kinds, max_sessions=max_sessions)
        self._answering: set[asyncio.Task[None]] = set()
        self._said: asyncio.Queue[AttachRequest | None] = asyncio.Queue()

    async def carry(self, address: str, token: str, stop: asyncio.Event) -> None:
        """Answer calls until the stream ends, which raises why. After `stop`, end it with the last answer."""
        metadata = rpc.metadata()
        if token:
            metadata = (*metadata, ("authorization", f"Bearer {token}"))
        self._said.put_nowait(AttachRequest(hello=self._servicer.description))
        try:
            async with rpc.channel(address) as channel, asyncio.TaskGroup() as group:
                group.create_task(self._end(stop))
                async for call in EnvManagerServiceStub(channel).Attach(self._speak(), metadata=metadata):
                    answering = group.create_task(self._answer(call))
                    self._answering.add(answering)
                    answering.add_done_callback(self._answering.discard)
                raise Unavailable("env_manager ended the stream.")
        except* aio.AioRpcError as refused:
            cause = from_rpc(_first(refused))
        except* FarmError as ended:
            cause = _first(ended)
        finally:
            self._said.put_nowait(None)
            await self._servicer.close()
        raise cause

    async def _speak(self) -> AsyncIterator[AttachRequest]:
        while (said := await self._said.get()) is not None:
            yield said

    async def _end(self, stop: asyncio.Event) -> None:
        await stop.wait()
        if self._answering:
            await asyncio.wait(self._answering, timeout=DRAIN_SECONDS)
        self._said.put_nowait(None)
        await asyncio.sleep(GOODBYE_SECONDS)
        raise Unavailable("The worker stops.")

    async def _answer(self, call: AttachResponse) -> None:
        answer = AttachRequest(call_id=call.call_id)
        try:
            match call.WhichOneof("content"):
                case "reset":
                    answer.reset.CopyFrom(await self._servicer.Reset(call.reset, None))
                case "step":
                    answer.step.CopyFrom(await self._servicer.Step(call.step, None))
                case "score":
                    answer.score.CopyFrom(await self._servicer.Score(call.score, None))
                case "close":
                    answer.close.CopyFrom(await self._servicer.Close(call.close, None))
                case unknown:
                    raise InvalidArgument(f"The worker does not know the call {unknown}.", call=unknown)
            if answer.ByteSize() > rpc.MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
                problem = f"The answer has {answer.ByteSize():,} bytes, more than a message may have."
                answer = AttachRequest(call_id=call.call_id)
                raise EnvironmentFailed(problem)
        except FarmError as error:
            answer.failure.CopyFrom(to_failure(error))
        self._said.put_nowait(answer)


def _first(group: "BaseExceptionGroup[E]") -> E:
    """The first of what was raised together."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
