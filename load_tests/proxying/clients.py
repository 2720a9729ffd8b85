"""What env_managers ask, of llm_proxy or of the engine itself: many requests on one stream, or one call each.

Each function here runs in a client process of its own. Both streams get the same generations and give the same tokens,
so that the difference of two figures is llm_proxy.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpc import aio

from load_tests.proxying import engine_grpc, payload
from load_tests.proxying.flow import Clocks, Flow
from load_tests.proxying.patterns import CALL_SECONDS, Closed, Held, Paced, Pattern, singly
from rollfarm import rpc
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

MESSAGE_REQUESTS = 100
"""Most requests of one message, when many are begun at once: an env_manager sends what one turn of its loop brought."""


@dataclass(frozen=True)
class Target:
    """Who is asked."""

    port: int
    pid: int
    """Whose CPU time and memory count."""

    direct: bool = False
    """It is an engine, not llm_proxy."""


class Stream:
    """One stream to llm_proxy or to an engine, whose requests are serialised already."""

    def __init__(self, channel: aio.Channel, target: Target, requests: int) -> None:
        path, self._parse = _direct() if target.direct else _proxied()
        self._call: Any = channel.stream_stream(path)(wait_for_ready=True)
        self._ids = [f"{id(self):x}-{number}" for number in range(requests)]
        make = payload.generation if target.direct else payload.proxied
        self._messages = [make(request_id).SerializeToString() for request_id in self._ids]
        self._sent = 0
        self._open: dict[str, float] = {}
        """When each was sent."""

    async def send(self, count: int) -> None:
        """Send the next requests, in one message."""
        first, self._sent = self._sent, self._sent + count
        message = payload.requests(self._messages[first : self._sent])
        now = time.perf_counter()
        self._open.update((request_id, now) for request_id in self._ids[first : self._sent])
        await self._call.write(message)

    async def take(self, clocks: Clocks, refilled: bool) -> list[float]:
        """Seconds until each answer, when all are there. Each answers an open request; refilled, another one begins."""
        latencies: list[float] = []
        while len(latencies) < len(self._ids):
            answered = self._parse(await self._call.read())
            now = time.perf_counter()
            if not latencies:
                clocks.note_memory()
            latencies += [now - self._open.pop(request_id) for request_id in answered]
            if refilled and (more := min(len(answered), len(self._ids) - self._sent)):
                await self.send(more)
        return latencies

    async def close(self) -> None:
        self._call.cancel()
        with suppress(asyncio.CancelledError):
            await self._call.code()


def _direct() -> tuple[str, Callable[[bytes], list[str]]]:
    def parse(data: bytes) -> list[str]:
        return _complete(engine_pb2.EngineServiceGenerateResponse.FromString(data).chunks)

    return f"/{engine_grpc.SERVICE}/Generate", parse


def _proxied() -> tuple[str, Callable[[bytes], list[str]]]:
    def parse(data: bytes) -> list[str]:
        return _complete(llm_proxy_pb2.GenerateManyResponse.FromString(data).results)

    return f"/{engine_grpc.PROXY_SERVICE}/GenerateMany", parse


def _complete(answers: Iterable[Any]) -> list[str]:
    """The requests answered; each with all of its tokens."""
    answers = list(answers)
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == 4 * payload.TOKENS, answer
    return [answer.request_id for answer in answers]


def stream(target: Target, pattern: Pattern) -> Flow:
    """Ask on one stream."""
    return asyncio.run(_stream(target, pattern))


async def _stream(target: Target, pattern: Pattern) -> Flow:
    async with rpc.channel(f"127.0.0.1:{target.port}") as channel, asyncio.timeout(CALL_SECONDS):
        await channel.channel_ready()
        stream = Stream(channel, target, pattern.requests)
        try:
            return await _follow(pattern, stream, Clocks(target.pid))
        finally:
            await stream.close()


async def _follow(pattern: Pattern, stream: Stream, clocks: Clocks) -> Flow:
    async with asyncio.TaskGroup() as group:
        answers = group.create_task(stream.take(clocks, refilled=isinstance(pattern, Closed)))
        match pattern:
            case Closed():
                await stream.send(pattern.in_flight)
            case Held():
                for first in range(0, pattern.requests, MESSAGE_REQUESTS):
                    await stream.send(min(MESSAGE_REQUESTS, pattern.requests - first))
            case Paced():
                async for count in pattern.due():
                    await stream.send(count)
    return clocks.flow(answers.result())


def unary(target: Target, pattern: Pattern) -> Flow:
    """Ask by calls of their own."""
    return asyncio.run(_unary(target, pattern))


async def _unary(target: Target, pattern: Pattern) -> Flow:
    async with rpc.channel(f"127.0.0.1:{target.port}") as channel, asyncio.timeout(CALL_SECONDS):
        await channel.channel_ready()
        call: Any = channel.unary_unary(f"/{engine_grpc.PROXY_SERVICE}/Generate")
        asked = (llm_proxy_pb2.GenerateRequest(generation=payload.proxied(f"u{n}")) for n in range(pattern.requests))
        messages = [one.SerializeToString() for one in asked]

        async def ask(number: int) -> float:
            began = time.perf_counter()
            answer = await call(messages[number], timeout=CALL_SECONDS)
            took = time.perf_counter() - began
            _complete([llm_proxy_pb2.GenerateResponse.FromString(answer).result])
            return took

        return await singly(ask, pattern, target.pid)
