"""env_manager's half that plays environments, wherever they run: `python -m load_tests.stepping.client TRANSPORT`.

Its code is env_manager's own, without the policy between two steps.
"""

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog
from grpc import aio

from env_manager.hosts import Hosts
from env_manager.processes import Processes
from env_manager.server import EnvManagerServicer
from env_manager.servers import Servers
from env_manager.worlds import World, Worlds
from load_tests.stepping import flow
from load_tests.stepping.flow import Order, Step
from rollfarm import rpc
from rollfarm.config import Telemetry
from rollfarm.env import Action
from rollfarm.ports import free_port
from rollfarm.service import ErrorInterceptor
from rollfarm.v1 import environment_pb2, trajectory_pb2

ECHO = "load_tests.stepping.echo"
FOUND_SECONDS = 60.0
MOST_CHARS = 1_000_000
"""As env_manager's configuration has it."""


class Player:
    """Plays over one transport."""

    def __init__(self, transport: str, hosts: Hosts, processes: Processes) -> None:
        self._transport = transport
        self._hosts = hosts
        self._worlds = Worlds(hosts, processes, most_chars=MOST_CHARS)
        self._numbers = itertools.count()
        self.server = 0
        """The process that plays, where it is not this one."""

    @asynccontextmanager
    async def opened(self, order: Order) -> AsyncIterator[tuple[Sequence[Step], int]]:
        """So many episodes."""
        task = trajectory_pb2.Task(
            environment=self._environment(order), settings_json=json.dumps({"chars": order.chars})
        )
        async with AsyncExitStack() as episodes:
            worlds: list[World] = []
            for _ in range(order.sessions):
                world = await episodes.enter_async_context(self._worlds.open(f"episode-{next(self._numbers)}", task))
                await world.reset()
                worlds.append(world)
            if self._transport == "process":
                self.server = int(worlds[0].environment_id.removeprefix("process:"))
            yield [partial(world.step, Action(flow.ACTION)) for world in worlds], self.server

    def _environment(self, order: Order) -> str:
        if self._transport in ("grpc", "attached"):
            return "echo_in_threads" if order.threads else "echo"
        where = {"in_process": "Threads" if order.threads else "", "process": "Process"}[self._transport]
        return f"{ECHO}:Echo" + (f"In{where}" if where else "")

    async def found(self) -> None:
        """Once a host plays."""
        if not await self._hosts.changed.first(lambda: self._hosts.playing("echo") or None, FOUND_SECONDS):
            raise TimeoutError("nobody plays")


async def main(transport: str) -> None:
    hosts = Hosts()
    processes = Processes(hosts, per_environment=1, hang_seconds=FOUND_SECONDS, telemetry=Telemetry())
    player = Player(transport, hosts, processes)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        loops: list[asyncio.Task[None]] = []
        if transport == "process":
            loops.append(group.create_task(_run(processes.run)))
        elif transport == "grpc":
            port = free_port()
            player.server = await stack.enter_async_context(_started("--port", str(port)))
            loops.append(group.create_task(_run(Servers([f"127.0.0.1:{port}"], hosts).run)))
            await player.found()
        elif transport == "attached":
            address = await stack.enter_async_context(_let_in(hosts))
            player.server = await stack.enter_async_context(_started("--attach", address))
            await player.found()
        await flow.obey(player.opened)
        for loop in loops:
            loop.cancel()


async def _run(loop: Callable[[], Awaitable[None]]) -> None:
    await loop()


@asynccontextmanager
async def _started(*flags: str) -> AsyncIterator[int]:
    """A process that plays, as its author starts it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", ECHO, *flags, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _let_in(hosts: Hosts) -> AsyncIterator[str]:
    """env_manager's server, for workers that dial in."""
    server = aio.server(interceptors=[ErrorInterceptor()], options=rpc.MESSAGE_OPTIONS)
    EnvManagerServicer(hosts, environment_pb2.EnvManagerServiceGetStatusResponse).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(main(sys.argv[1]))
