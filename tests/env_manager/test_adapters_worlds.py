"""Worlds that need an environment of their own (`make worlds`): served from there over gRPC, or by their own server."""

import json
import os
import re
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from env_manager.adapters.openenv import OpenEnv
from env_manager.hosts import Hosts
from env_manager.remote import RemoteWorld
from env_manager.servers import Server
from rollfarm import rpc
from rollfarm.env import Action, Step, ToolCall
from rollfarm.errors import EnvironmentFailed, InvalidArgument
from rollfarm.playing import Play, read_settings
from rollfarm.ports import free_port
from rollfarm.v1 import environment_pb2_grpc
from rollfarm.v1.trajectory_pb2 import Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
WORLDS = Path(__file__).with_name("worlds")
START_SECONDS = 120.0
CALL_SECONDS = 200.0
"""TextWorld compiles a game, and verifiers' first import takes most of a minute, on a busy machine."""


@pytest.fixture(scope="module")
def python() -> Path:
    found = Path(os.environ.get("ROLLFARM_WORLDS_PYTHON", ROOT / ".venv-worlds/bin/python"))
    if not found.is_file():
        pytest.skip(f"The worlds are not installed ({found}): run `make worlds`, or set ROLLFARM_WORLDS_PYTHON")
    return found


@contextmanager
def started(port: int, *command: str | Path) -> Iterator[None]:
    """A server in the checkout, once it takes connections."""
    environment = {**os.environ, "PYTHONPATH": str(WORLDS)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(port):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(python: Path) -> Iterator[str]:
    """Adapters served from the worlds' own environment."""
    port = free_port()
    with started(port, python, "-m", "env_manager.adapters", "textworld", "verifiers", "--port", str(port)):
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def echo(python: Path) -> Iterator[str]:
    port = free_port()
    with started(port, python, WORLDS / "openenv_echo.py", str(port)):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def playing(
    server: str, name: str, *, seed: int = 3, index: int = 0, **settings: Any
) -> AsyncIterator[RemoteWorld]:
    task = Task(environment=name, settings_json=json.dumps(settings), seed=seed, index=index)
    async with rpc.channel(server) as channel:
        host = Server(server, Hosts().changed, environment_pb2_grpc.EnvironmentServiceStub(channel))
        world = RemoteWorld(host, uuid.uuid4().hex, task, CALL_SECONDS)
        try:
            yield world
        finally:
            await world.close()


async def say(world: RemoteWorld, text: str) -> Step:
    return await world.step(Action(text))


@asynccontextmanager
async def echoing(url: str, **settings: Any) -> AsyncIterator[Play]:
    episode = Play(OpenEnv, read_settings(OpenEnv, json.dumps({"url": url, **settings})))
    try:
        yield episode
    finally:
        await episode.close()


async def test_a_generated_coin_is_found_by_what_the_game_says(server: str, tmp_path: Path):
    shown: list[list[str]] = []
    settings = {"challenge": "coin_collector", "options": {"level": 2}, "folder": str(tmp_path), "commands": True}
    for _ in range(2):
        async with playing(server, "textworld", **settings) as episode:
            texts, reward, step = [(await episode.reset()).text], 0.0, Step()
            for command in ("dance", *re.findall(r"(?:north|south|east|west)", texts[0].split("-=")[0]), "take coin"):
                step = await say(episode, command if command in ("dance", "take coin") else f"go {command}")
                texts.append(step.text)
                reward += step.reward
        assert (reward, step.done, step.truncated, step.metrics["success"]) == (1.0, True, False, 1.0)
        shown.append(texts)

    assert shown[0] == shown[1]
    assert [path.suffix for path in tmp_path.iterdir()].count(".z8") == 1  # noqa: ASYNC240
    assert "That's not a verb I recognise." in shown[0][1]


async def test_games_of_other_seeds_differ_and_wrong_options_are_told(server: str, tmp_path: Path):
    first: list[str] = []
    for seed in (1, 2):
        async with playing(server, "textworld", seed=seed, folder=str(tmp_path), turns=1) as episode:
            first.append((await episode.reset()).text)
            assert (await say(episode, "")).truncated
    async with playing(server, "textworld", folder=str(tmp_path), options={"depth": 1}) as episode:
        with pytest.raises(EnvironmentFailed, match="unknown options depth; rooms takes rooms, objects, quest_length"):
            await episode.reset()

    assert first[0] != first[1]


async def test_a_rollout_of_verifiers_is_scored_by_its_rubric(server: str):
    for index, reply, reward in ((1, "2", 1.0), (4, "2", 1.0), (1, "3", 0.0)):
        async with playing(server, "verifiers", id="vf_small", index=index) as episode:
            asked = await episode.reset()
            end = await say(episode, reply)

        assert (asked.text, asked.reference) == ("what is 1 plus 1", "2")
        assert (end.reward, end.done, end.metrics["right"]) == (reward, True, reward)


async def test_a_conversation_of_verifiers_shows_what_is_new_each_turn(server: str):
    async with playing(server, "verifiers", id="vf_small", index=1, options={"kind": "conversation"}) as episode:
        asked = await episode.reset()
        doubted = await say(episode, "1")
        end = await say(episode, "2")

    assert asked.system == "be brief"
    assert doubted.text == "sure about 1?"
    assert (end.reward, end.metrics["num_turns"]) == (1.0, 2.0)


async def test_tools_of_verifiers_are_called_and_answer(server: str):
    async with playing(server, "verifiers", id="vf_small", index=1, options={"kind": "tools"}) as episode:
        asked = await episode.reset()
        called = await episode.step(Action("", [ToolCall("a", "double", {"number": 1})]))
        end = await say(episode, "2")

    assert asked.tools[0]["function"]["name"] == "double"
    assert [result.text for result in called.tool_results] == ["2"]
    assert end.reward == 1.0


async def test_an_unknown_environment_of_verifiers_is_named(server: str):
    async with playing(server, "verifiers", id="vf_nowhere") as episode:
        with pytest.raises(EnvironmentFailed, match="vf_nowhere"):
            await episode.reset()


async def test_openenv_echoes_over_one_connection_for_each_episode(echo: str):
    async with echoing(echo, options={"level": 2}) as first, echoing(echo, turns=1) as second:
        asked = await first.reset(7, 0)
        await second.reset(2**40, 0)
        steps = [await first.step(Action("hello")) for _ in range(3)]
        cut = await second.step(Action("ab"))

    assert asked.text == "seed 7 {'level': 2}"
    assert [(step.text, step.reward, step.done) for step in steps] == [("olleh", 5.0, n == 2) for n in range(3)]
    assert (cut.text, cut.done, cut.truncated) == ("ba", True, True)


async def test_an_action_that_openenv_refuses_is_told_to_the_policy(echo: str):
    async with echoing(echo, action="", observation="text") as episode:
        await episode.reset(7, 0)
        said = ("hello", "[" * 100_000, '{"words": 1}', '{"message": "abc"}')
        texts = [(await episode.step(Action(text))).text for text in said]

    assert all("The action is not a JSON object." in text for text in texts[:2])
    assert "message: Field required" in texts[2]
    assert texts[3] == "cba"


async def test_a_field_that_openenv_does_not_show_is_the_caller_s_mistake(echo: str):
    async with echoing(echo, observation="picture") as episode:
        with pytest.raises(InvalidArgument, match="no 'picture', but"):
            await episode.reset(7, 0)


async def test_openenv_server_that_dies_fails_the_episode(python: Path):
    port = free_port()
    with started(port, python, WORLDS / "openenv_echo.py", str(port)):
        episode = Play(OpenEnv, {"url": f"http://127.0.0.1:{port}"})
        await episode.reset(0, 0)

    with pytest.raises(EnvironmentFailed):
        await episode.step(Action("hello"))
    await episode.close()
