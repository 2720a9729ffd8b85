"""What both clients do alike, ours and OpenEnv's: play as they are told on stdin, measure, and say so on stdout.

OpenEnv's runs in an environment of its own, so this imports nothing of the project.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass

import psutil

ACTION = "go left"
SHORT, LONG = 16, 10_000
"""Characters of an observation."""

WARM_STEPS = 10
"""Of each session, before the clocks start."""


@dataclass(frozen=True)
class Order:
    """What to play."""

    sessions: int
    """Episodes at once, each with one step under way at all times."""

    chars: int
    """Of each observation."""

    threads: bool
    """Whether the environment's methods run in threads, as those that are not async do, and not on the loop."""

    seconds: float
    """How long."""


@dataclass(frozen=True)
class Flow:
    """Steps that were answered."""

    steps: int
    seconds: float

    client_seconds: float
    """CPU time of the client's process: user and system, all threads."""

    server_seconds: float
    """The same of the process that plays; 0 where that is the client."""

    @property
    def per_second(self) -> float:
        return self.steps / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of a step on both ends, microseconds."""
        return self.client_us + self.server_us

    @property
    def client_us(self) -> float:
        return 1e6 * self.client_seconds / self.steps

    @property
    def server_us(self) -> float:
        return 1e6 * self.server_seconds / self.steps


Step = Callable[[], Awaitable[object]]
Open = Callable[[Order], AbstractAsyncContextManager[tuple[Sequence[Step], int]]]
"""Opens the sessions: the next step of each, and the process that plays them, 0 where that is this one."""


async def obey(open_sessions: Open) -> None:
    """Play every order that comes, until stdin ends."""
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = Order(**json.loads(line))
        async with open_sessions(order) as (steps, server):
            print(json.dumps(asdict(await measure(steps, order.seconds, server))), flush=True)


async def measure(steps: Sequence[Step], seconds: float, server: int) -> Flow:
    """Keep a step of each session under way for so long."""
    await asyncio.gather(*(_play(step, WARM_STEPS) for step in steps))
    client_before, server_before = cpu_seconds(psutil.Process().pid), cpu_seconds(server)
    began = time.perf_counter()
    played = await asyncio.gather(*(_play_until(step, began + seconds) for step in steps))
    took = time.perf_counter() - began
    return Flow(
        steps=sum(played),
        seconds=took,
        client_seconds=cpu_seconds(psutil.Process().pid) - client_before,
        server_seconds=cpu_seconds(server) - server_before,
    )


def cpu_seconds(pid: int) -> float:
    """Spent by the process so far; 0 for none."""
    return sum(psutil.Process(pid).cpu_times()[:2]) if pid else 0.0


async def _play(step: Step, count: int) -> None:
    for _ in range(count):
        await step()


async def _play_until(step: Step, end: float) -> int:
    count = 0
    while time.perf_counter() < end:
        await step()
        count += 1
    return count
