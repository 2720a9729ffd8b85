"""Agents in real containers. Skipped where no Docker daemon answers, or there is no image with Python."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from env_manager.agent_config import AgentConfig
from env_manager.agent_container import END_LABEL, ContainerRunner
from env_manager.runners import Ran
from rollfarm.config import Listen
from rollfarm.errors import AgentFailed
from rollfarm.threads import in_thread
from rollfarm.v1 import trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeRewards, episode, working
from tests.env_manager.test_agents import ASK, RIDDLE, assert_trains_on_what_the_engine_made
from tests.llm_proxy.fronts import scripted

docker = pytest.importorskip("docker")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IMAGE = "python:3.11-slim-bookworm"

LONG = 120.0


@pytest.fixture(scope="module")
def client() -> Any:
    try:
        connected = docker.from_env()
        connected.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker daemon answers: {error}")
    try:
        connected.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        try:
            connected.images.pull(IMAGE)
        except docker.errors.DockerException as error:
            pytest.skip(f"there is no image {IMAGE}: {error}")
    return connected


@pytest.fixture(autouse=True)
async def nothing_is_left(client: Any) -> AsyncIterator[None]:
    yield
    await until(lambda: not ours(client))


def ours(client: Any) -> list[Any]:
    return client.containers.list(all=True, filters={"label": END_LABEL})


async def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not await in_thread(ready):
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


def runner(program: str, *, output_bytes: int = 1000, **variables: str) -> ContainerRunner:
    config = AgentConfig(image=IMAGE, command=["python3", "-c", program], output_bytes=output_bytes)
    return ContainerRunner(config, variables)


async def test_it_reads_the_task_and_what_it_prints_is_the_answer():
    program = "import os, sys; print('and', sys.stdin.read().upper(), os.environ['ONE'], os.environ['TWO'])"

    ran = await runner(program, ONE="1").run("what is one\nör two", {"TWO": "2"}, LONG)

    assert ran == Ran(answer="and WHAT IS ONE\nÖR TWO 1 2", status=0)


async def test_one_that_fails_tells_its_status_and_its_last_complaint():
    ran = await runner("import sys; sys.exit('no luck')").run("", {}, LONG)

    assert (ran.status, ran.complaint) == (1, "no luck")


async def test_one_that_hangs_is_killed_and_of_what_it_printed_the_end_is_kept():
    program = "import time\nfor _ in range(50): print('x' * 1000)\nprint('end', flush=True)\ntime.sleep(1000)"

    ran = await runner(program, output_bytes=10).run("", {}, 5.0)

    assert ran == Ran(answer="xxxxx\nend", status=None)


async def test_a_cancelled_one_is_removed(client: Any):
    running = asyncio.create_task(runner("import time; time.sleep(1000)").run("", {}, LONG))
    await until(lambda: any(each.status == "running" for each in ours(client)))

    running.cancel()

    await until(lambda: not ours(client))


async def test_one_whose_env_manager_died_is_removed_by_the_next_once_its_time_is_over(client: Any):
    def leave(end: float) -> Any:
        return client.containers.run(IMAGE, ["sleep", "1000"], detach=True, labels={END_LABEL: str(int(end))})

    late, other = leave(time.time() - 1), leave(time.time() + 1000)

    await runner("print(1)").run("", {}, LONG)

    left = [each.id for each in ours(client)]
    other.remove(force=True)
    assert late.id not in left
    assert other.id in left


async def test_an_image_that_is_not_there_fails_the_episode():
    with pytest.raises(AgentFailed, match="The agent's container failed: ImageNotFound"):
        await ContainerRunner(AgentConfig(image="no/such-image-here:1"), {}).run("", {}, LONG)


@pytest.fixture
def network(client: Any) -> Iterator[Any]:
    """One without a way out, but to this machine."""
    made = client.networks.create(f"rollfarm-test-{uuid.uuid4().hex[:8]}", internal=True)
    made.reload()
    yield made
    made.remove()


def gateway_of(network: Any) -> str:
    return network.attrs["IPAM"]["Config"][0]["Gateway"]


async def test_an_agent_in_a_network_of_llm_proxy_alone_is_a_trajectory(network: Any):
    command = ["python3", "-c", ASK + "print(ask(sys.stdin.read()))"]
    agents = {"play": {"image": IMAGE, "command": command, "network": network.name}}
    listen = Listen(host=gateway_of(network), drain_seconds=0)
    async with scripted(lambda prompt: "Paris<|im_end|>", listen=listen) as (proxy, script):
        buffer, rewards = FakeBuffer(), FakeRewards()
        buffer.add(episode(RIDDLE, max_tokens=100))
        async with working(buffer, proxy.address, rewards, agents=agents):
            await buffer.until(lambda: bool(buffer.completed or buffer.failed), LONG)

        assert not buffer.failed, [failed.detail for failed in buffer.failed.values()]
        (trajectory,) = buffer.completed.values()
        assert trajectory.outcome == trajectory_pb2.OUTCOME_OK
        assert trajectory.metrics["success"] == 1.0
        assert_trains_on_what_the_engine_made(trajectory, script)
