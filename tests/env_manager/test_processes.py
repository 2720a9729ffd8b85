"""Environments in processes of env_manager's own: real ones, which really die."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from env_manager import processes as processes_module
from env_manager.hosts import Hosts
from env_manager.processes import Processes
from env_manager.worlds import World, Worlds
from rollfarm.config import Telemetry
from rollfarm.env import Action
from rollfarm.errors import EnvironmentFailed
from rollfarm.v1.environment_pb2 import EnvironmentHost
from rollfarm.v1.trajectory_pb2 import Task
from tests.env_manager.hosting import running, until

ROOT = Path(__file__).parents[2]

NAME = "tests.env_manager.deadly:Deadly"


@asynccontextmanager
async def playing(count: int = 1, *, hang_seconds: float = 60.0) -> AsyncIterator[tuple[Hosts, Worlds]]:
    hosts = Hosts()
    processes = Processes(hosts, per_environment=count, hang_seconds=hang_seconds, telemetry=Telemetry())
    async with running(processes.run):
        yield hosts, Worlds(hosts, processes)


async def begin(stack: contextlib.AsyncExitStack, worlds: Worlds, session: str) -> tuple[World, int]:
    """An episode and the process that plays it."""
    world = await stack.enter_async_context(worlds.open(session, Task(environment=NAME)))
    return world, int((await world.reset()).text)


async def test_a_process_that_dies_fails_its_episodes_alone_and_is_started_again():
    async with playing(2) as (hosts, worlds), contextlib.AsyncExitStack() as stack:
        async with worlds.open("warm", Task(environment=NAME)):
            await until(hosts, lambda seen: len(seen) == 2 and all(host.healthy for host in seen))
        (broken, first), (whole, second) = [await begin(stack, worlds, session) for session in "ab"]

        with pytest.raises(EnvironmentFailed, match=rf"process:{first}: The process died \(SIGSEGV\)"):
            await broken.step(Action("die"))

        assert first != second
        assert os.getpid() not in (first, second)
        assert (await whole.step(Action("on"))).text == "on"
        await until(hosts, lambda seen: len(seen) == 2 and all(host.healthy for host in seen))
        assert {host.kind for host in hosts.hosts()} == {EnvironmentHost.KIND_PROCESS}
        assert f"process:{first}" not in {host.address for host in hosts.hosts()}
    assert not psutil.pid_exists(second)


async def test_a_process_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes_module, "HEALTH_SECONDS", 0.1)
    async with playing(hang_seconds=2) as (hosts, worlds), contextlib.AsyncExitStack() as stack:
        world, pid = await begin(stack, worlds, "a")

        with pytest.raises(EnvironmentFailed, match="The process hung for 2 s and was killed"):
            await world.step(Action("stop"))

        await until(hosts, lambda seen: [host.healthy for host in seen] == [True])
        assert not psutil.pid_exists(pid)


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes_module, "FIRST_BACKOFF_SECONDS", 0.01)
    starts: list[str] = []
    really = asyncio.create_subprocess_exec

    async def start(program: str, *arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        starts.append(program)
        return await really("/no/such/program" if len(starts) < 3 else program, *arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with playing() as (_, worlds), contextlib.AsyncExitStack() as stack:
        world, _ = await begin(stack, worlds, "a")

        assert (await world.step(Action("on"))).text == "on"
        assert len(starts) == 3


FARM = """
import asyncio
import sys

from env_manager.hosts import Hosts
from env_manager.processes import Processes
from env_manager.worlds import Worlds
from rollfarm.config import Telemetry
from rollfarm.env import Action
from rollfarm.v1.trajectory_pb2 import Task


async def main():
    hosts = Hosts()
    processes = Processes(hosts, per_environment=1, hang_seconds=60, telemetry=Telemetry())
    running = asyncio.create_task(processes.run())
    async with Worlds(hosts, processes).open("a", Task(environment="tests.env_manager.deadly:Deadly")) as world:
        print("process", (await world.reset()).text, flush=True)
        await world.step(Action("stop"))


asyncio.run(main())
"""


def test_no_process_outlives_an_env_manager_that_is_killed():
    env_manager = subprocess.Popen([sys.executable, "-c", FARM], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert env_manager.stdout is not None
    said = next(line for line in env_manager.stdout if line.startswith("process "))
    child = psutil.Process(int(said.split()[1]))

    env_manager.kill()
    env_manager.wait()

    child.wait(20)
    env_manager.stdout.close()
    assert not child.is_running()
