"""In which order and number requests are sent, and the loop for clients that ask one request at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from load_tests.proxying.flow import Clocks, Flow

CALL_SECONDS = 120.0
"""No measurement takes longer."""


@dataclass(frozen=True)
class Closed:
    """`in_flight` requests at all times, until `requests` are answered: as fast as it goes."""

    requests: int
    in_flight: int


@dataclass(frozen=True)
class Paced:
    """`rate` requests a second, whatever becomes of them, until `requests` are sent."""

    requests: int
    rate: float

    async def due(self) -> AsyncIterator[int]:
        """How many to send, whenever some are; the first at once."""
        began, sent = time.perf_counter(), 0
        while sent < self.requests:
            await asyncio.sleep(began + sent / self.rate - time.perf_counter())
            now = min(self.requests, int((time.perf_counter() - began) * self.rate) + 1)
            if now > sent:
                yield now - sent
                sent = now


@dataclass(frozen=True)
class Held:
    """Every request at once, so that all are open together."""

    requests: int


Pattern = Closed | Paced | Held


def connections(pattern: Pattern) -> int:
    """How many a client needs that asks one request at a time on each; a paced one cannot know."""
    match pattern:
        case Closed():
            return pattern.in_flight
        case Held():
            return pattern.requests
        case Paced():
            return 1


async def singly(ask: Callable[[int], Awaitable[float]], pattern: Pattern, pid: int) -> Flow:
    """Run a pattern with `ask`, which sends the request of a number and returns the seconds until its answer."""
    numbers = iter(range(pattern.requests))
    latencies: list[float] = []
    clocks = Clocks(pid)

    async def send(number: int) -> None:
        took = await ask(number)
        if not latencies:
            clocks.note_memory()
        latencies.append(took)

    async def worker() -> None:
        for number in numbers:
            await send(number)

    async with asyncio.TaskGroup() as group:
        if isinstance(pattern, Paced):
            async for count in pattern.due():
                for _ in range(count):
                    group.create_task(send(next(numbers)))
        else:
            for _ in range(connections(pattern)):
                group.create_task(worker())
    return clocks.flow(latencies)
