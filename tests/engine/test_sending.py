"""What reaches llm_proxy in one message."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llm_proxy.engine.requests import Chunk, Limits
from llm_proxy.engine.server import EngineServicer
from rollfarm import rpc
from rollfarm.tokens import pack_ids
from rollfarm.v1 import engine_pb2, trajectory_pb2


class Silent:
    """An engine that has requests and generates by the test's hand alone."""

    limits = Limits(slot_count=8, context_token_count=64, vocabulary_size=100)

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.cancelled: list[str] = []
        self.has_requests = asyncio.Event()

    def submit(self, requests: Any) -> None:
        self.keys += [request.key for request in requests]
        self.has_requests.set()

    def cancel(self, keys: Any) -> None:
        self.cancelled += keys


async def asked(*request_ids: str) -> AsyncIterator[engine_pb2.EngineServiceGenerateRequest]:
    sampling = trajectory_pb2.Sampling(max_tokens=8, top_p=1.0)
    yield engine_pb2.EngineServiceGenerateRequest(
        generations=[
            engine_pb2.Generation(request_id=request_id, prompt_token_ids=pack_ids([1]), sampling=sampling)
            for request_id in request_ids
        ]
    )
    await asyncio.Event().wait()


async def test_chunks_that_follow_a_message_closely_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(rpc, "MOST_PAUSE_SECONDS", 0.2)
    adapter: Any = Silent()
    context: Any = None
    servicer = EngineServicer(adapter)
    messages: Any = servicer.Generate(asked("a", "b", "c"), context)
    first = asyncio.create_task(anext(messages))
    await adapter.has_requests.wait()
    a, b, c = [Chunk(key, [1], [0.0], [(0, 1)]) for key in adapter.keys]

    servicer.deliver([a])
    alone = await first
    second = asyncio.create_task(anext(messages))
    for late in (b, c):
        servicer.deliver([late])
        await asyncio.sleep(0.01)
    together = await second

    assert [chunk.request_id for chunk in alone.chunks] == ["a"]
    assert [chunk.request_id for chunk in together.chunks] == ["b", "c"]
    await messages.aclose()


async def test_a_request_goes_on_and_can_be_cancelled_when_its_id_is_sent_again() -> None:
    adapter: Any = Silent()
    context: Any = None
    servicer = EngineServicer(adapter)
    messages: Any = servicer.Generate(asked("a", "a"), context)

    (refused,) = (await anext(messages)).chunks
    await servicer.Cancel(engine_pb2.EngineServiceCancelRequest(request_ids=["a"]), context)
    await messages.aclose()

    assert refused.failure.reason == "INVALID_ARGUMENT"
    assert adapter.cancelled == adapter.keys * 2


async def test_long_answers_that_end_together_do_not_fit_in_one_message() -> None:
    adapter: Any = Silent()
    context: Any = None
    servicer = EngineServicer(adapter)
    names = [f"r{number}" for number in range(20)]
    messages: Any = servicer.Generate(asked(*names), context)
    first = asyncio.create_task(anext(messages))
    await adapter.has_requests.wait()
    count = rpc.CHUNK_BYTES // 8 // 4

    servicer.deliver([Chunk(key, [1] * count, [0.0] * count, [(0, count)]) for key in adapter.keys])
    received = [await first]
    while sum(len(message.chunks) for message in received) < len(names):
        received.append(await anext(messages))

    assert [chunk.request_id for message in received for chunk in message.chunks] == names
    assert max(message.ByteSize() for message in received) <= rpc.CHUNK_BYTES
    await messages.aclose()
