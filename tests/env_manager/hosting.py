"""Hosts of environments for tests: real servers and workers, beside the real code that reaches them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from env_manager.hosts import Hosts
from env_manager.server import EnvManagerServicer
from env_manager.servers import Servers
from env_manager.worlds import World
from rollfarm.env import Action, Environment, Kind, Step
from rollfarm.env_attach import attach
from rollfarm.v1 import environment_pb2, trajectory_pb2
from tests.env_manager.fakes import serving, worlds_of


class Echo(Environment):
    """Says what was said."""

    runs = "loop"

    def reset(self, seed: int, index: int) -> str:
        return f"seed {seed}"

    def step(self, action: Action) -> Step:
        return Step(action, reward=1.0, done=action == "bye")


@asynccontextmanager
async def running(loop: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """With `loop` beside, until the block ends. A bug in it rises here."""

    async def run() -> None:
        await loop()

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


@asynccontextmanager
async def letting_in(hosts: Hosts, *, token: str = "", port: int = 0) -> AsyncIterator[str]:
    """An env_manager that workers attach to, and its address."""
    servicer = EnvManagerServicer(hosts, environment_pb2.EnvManagerServiceGetStatusResponse, attach_token=token)
    async with serving(servicer.register, port) as address:
        yield address


@asynccontextmanager
async def attached(address: str, *kinds: Kind, token: str = "") -> AsyncIterator[asyncio.Event]:
    """A worker that dials in. Setting the event stops it, as SIGTERM would, and so does the block's end."""
    stop = asyncio.Event()
    working = asyncio.create_task(attach(kinds, address, stop, token=token))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(working, 20)


@asynccontextmanager
async def dialling(hosts: Hosts, *names: str) -> AsyncIterator[None]:
    """With servers dialled."""
    async with running(Servers(names, hosts).run):
        yield


async def until(hosts: Hosts, reached: Callable[[list[environment_pb2.EnvironmentHost]], bool]) -> None:
    """Until the hosts are as they should be."""
    seen = await hosts.changed.first(lambda: reached(hosts.hosts()) or None, 20)
    assert seen, hosts.hosts()


@asynccontextmanager
async def world_of(hosts: Hosts, environment: str = "echo", session: str = "a", **settings) -> AsyncIterator[World]:
    """An episode that was reset."""
    task = trajectory_pb2.Task(environment=environment, seed=7)
    async with worlds_of(hosts, **settings).open(session, task) as world:
        await world.reset()
        yield world
