"""What travels in one message, to an engine and to who asked."""

import asyncio
from typing import Any

import pytest

from llm_proxy.config import LlmProxyConfig
from llm_proxy.engines import Connection, Fleet
from llm_proxy.server import Stream
from rollfarm import rpc
from rollfarm.v1 import engine_pb2
from tests.llm_proxy.world import LENGTH, World, asked, chunk


class Written:
    """A stream to an engine that keeps what was written."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self._more = asyncio.Event()

    async def write(self, message: bytes) -> None:
        request = engine_pb2.EngineServiceGenerateRequest.FromString(message)
        self.messages.append([generation.request_id for generation in request.generations])
        self._more.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.messages) < count:
                self._more.clear()
                await self._more.wait()


def send(connection: Connection, request_id: str) -> None:
    connection.send([engine_pb2.Generation(request_id=request_id)])


async def test_requests_that_follow_a_message_closely_travel_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rpc, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(rpc, "MOST_PAUSE_SECONDS", 0.2)
    connection = Connection("127.0.0.1:1", Fleet(LlmProxyConfig(engines=[])))
    call: Any = Written()
    writing = asyncio.create_task(connection._write(call))

    send(connection, "first")
    await call.until(1)
    for late in ("b", "c", "d"):
        send(connection, late)
        await asyncio.sleep(0.01)
    await call.until(2)

    assert call.messages == [["first"], ["b", "c", "d"]]
    writing.cancel()


def test_what_is_too_large_for_a_message_is_halved_until_it_fits_and_keeps_its_order():
    def joined(messages: list[engine_pb2.Generation]) -> str:
        return "".join(message.request_id for message in messages)

    messages = [engine_pb2.Generation(request_id=text) for text in ("a", "b", "c", "dddd", "e")]

    assert list(rpc.fitted(joined, len, messages, most_bytes=2)) == ["ab", "c", "dddd", "e"]
    assert list(rpc.fitted(joined, len, messages, most_bytes=8)) == ["abcdddde"]
    assert list(rpc.fitted(joined, len, [], most_bytes=8)) == []


async def test_results_that_are_too_large_for_a_message_travel_in_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rpc, "CHUNK_BYTES", 3000)
    world, stream = World(), Stream()
    world.engine("e", slots=5, context=1000)
    for name in "abcde":
        world.router.submit(asked(name, max_tokens=150), stream, world.now)
    world.step()
    for name in "abcde":
        world.router.receive("e", chunk(name, [1] * 150, reason=LENGTH), world.now)
    world.step()

    messages = await stream.ready()

    assert [[result.request_id for result in message.results] for message in messages] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]
    assert all(len(result.token_ids) == 600 for message in messages for result in message.results)


async def test_what_a_message_carried_delays_the_next_one(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(rpc.time, "monotonic", lambda: 10.0)
    monkeypatch.setattr(rpc.asyncio, "sleep", sleep)
    pace = rpc.Pace()

    for count in (1, 2, 100):
        await pace.wait()
        pace.sent(count)
    await pace.wait()

    assert slept == pytest.approx([0.001, 0.002, 0.004])
