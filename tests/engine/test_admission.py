"""Which requests an inference server holds, and which wait before it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from llm_proxy.engine.adapters.admission import Admission, Tasks
from llm_proxy.engine.requests import LENGTH, Chunk, Request


async def turns() -> None:
    """What can be done without the server is done."""
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass
class Server:
    """It answers who it is told to."""

    admission: Admission
    held: list[str]
    answers: dict[str, asyncio.Event]
    delivered: list[Chunk]

    async def submit(self, *names: str) -> None:
        self.admission.submit([Request(key=name, prompt=np.array([1], np.int32), max_tokens=1) for name in names])
        await turns()

    async def answer(self, name: str) -> None:
        self.answers[name].set()
        await turns()


@asynccontextmanager
async def serving(*, slots: int) -> AsyncGenerator[Server, None]:
    held: list[str] = []
    answers: dict[str, asyncio.Event] = {}
    delivered: list[Chunk] = []

    async def generate(request: Request) -> AsyncGenerator[Chunk, None]:
        held.append(request.key)
        answers[request.key] = asyncio.Event()
        await answers[request.key].wait()
        yield Chunk(request.key, finish=LENGTH)

    def deliver(chunks: Sequence[Chunk]) -> None:
        delivered.extend(chunks)

    tasks = Tasks()
    admission = Admission(generate, deliver, tasks, slot_count=slots)
    yield Server(admission, held, answers, delivered)
    tasks.stop()


NAMES = [f"{number:02}" for number in range(45)]


async def test_one_request_for_every_twenty_slots_lies_ready_in_the_server() -> None:
    async with serving(slots=40) as server:
        await server.submit(*NAMES)

        assert server.held == NAMES[:42]
        assert (server.admission.running_count, server.admission.waiting_count) == (40, 5)

        await server.answer("07")
        assert server.held == NAMES[:43]
        assert (server.admission.running_count, server.admission.waiting_count) == (40, 4)


async def test_who_lies_ready_is_for_the_server_to_abort_and_who_waits_is_not() -> None:
    async with serving(slots=40) as server:
        await server.submit(*NAMES)

        assert server.admission.cancel(["41", "42"]) == {"41"}
        assert [chunk.key for chunk in server.delivered] == ["42"]


async def test_a_server_of_few_slots_holds_no_more_than_it_runs() -> None:
    async with serving(slots=2) as server:
        await server.submit("a", "b", "c")

        assert server.held == ["a", "b"]
