"""Tools of a real MCP server, by command and by URL; and a server of OpenEnv's that is not there."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from env_manager.adapters.mcp import Mcp
from env_manager.adapters.openenv import OpenEnv
from rollfarm.env import Action, Observation, ToolCall
from rollfarm.errors import EnvironmentFailed, InvalidArgument
from rollfarm.playing import Play, read_settings
from rollfarm.ports import free_port

SERVER = str(Path(__file__).with_name("mcp_sums.py"))
QUESTIONS = [{"question": "2 + 3?", "answer": "5"}, {"question": "Capital of France?", "answer": "Paris"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not _answers(port):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def playing(*, seed: int = 0, index: int = 0, **settings: Any) -> AsyncIterator[tuple[Play, Observation]]:
    episode = Play(Mcp, read_settings(Mcp, json.dumps({"questions": QUESTIONS, **settings})))
    try:
        yield episode, await episode.reset(seed, index)
    finally:
        await episode.close()


def calls(*asked: tuple[str, dict[str, Any]]) -> Action:
    return Action("", [ToolCall(str(number), name, arguments) for number, (name, arguments) in enumerate(asked)])


async def said(episode: Play, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    return [result.text for result in (await episode.step(calls(*asked))).tool_results]


async def test_a_question_is_answered_with_the_tools_of_a_command():
    async with playing(command=[sys.executable, SERVER], environment={"COLOUR": "blue"}) as (episode, asked):
        results = await episode.step(calls(("add", {"first": 2, "second": 3}), ("variable", {"name": "COLOUR"})))
        end = await episode.step(Action(" 5\n"))

    assert (asked.text, asked.reference) == ("2 + 3?", "5")
    assert [(result.tool_call_id, result.name, result.text) for result in results.tool_results] == [
        ("0", "add", "5"),
        ("1", "variable", "blue"),
    ]
    assert (end.reward, end.done, end.metrics) == (1.0, True, {"success": 1.0})


async def test_tools_are_shown_as_openai_describes_them(url: str):
    async with playing(url=url) as (_, asked):
        tools = {tool["function"]["name"]: tool for tool in asked.tools}

    assert set(tools) == {"add", "fail", "variable", "wait"}
    assert tools["add"]["type"] == "function"
    assert tools["add"]["function"]["description"] == "Add two numbers."
    assert tools["add"]["function"]["parameters"]["required"] == ["first", "second"]


async def test_what_goes_wrong_in_a_tool_is_told_to_the_policy(url: str):
    async with playing(url=url, call_seconds=1.0) as (episode, _):
        told = await said(episode, ("multiply", {}), ("fail", {}), ("add", {"first": "x"}), ("wait", {"seconds": 3}))
        after = await said(episode, ("add", {"first": 1, "second": 1}))

    assert told[0] == "Error: no tool is called multiply. There are: add, fail, variable, wait."
    assert all(text.startswith("Error: ") for text in told)
    assert after == ["2"]


async def test_questions_come_in_turn_and_equal_ones_for_equal_tasks(url: str):
    async with playing(url=url, index=3, seed=1) as (episode, asked):
        end = await episode.step(Action("paris"))
    async with playing(url=url, index=3, seed=1) as (_, again):
        pass

    assert asked == again
    assert asked.text == "Capital of France?"
    assert end.reward == 1.0


def draw(seed: int, index: int) -> tuple[str, str]:
    """A task for tests."""
    return f"{seed} + {index}?", str(seed + index)


def close_to(answer: str, right: str) -> float:
    """A reward for tests: half where only the first character is right."""
    return 1.0 if answer == right else 0.5 * (answer[:1] == right[:1])


async def test_tasks_and_rewards_may_be_functions_of_one_s_own(url: str):
    module = "tests.env_manager.test_adapters_mcp"
    settings = {"questions": [], "task": f"{module}:draw", "reward": f"{module}:close_to"}

    async with playing(url=url, seed=12, index=30, **settings) as (episode, asked):
        end = await episode.step(Action("4"))

    assert (asked.text, asked.reference) == ("12 + 30?", "42")
    assert (end.reward, end.metrics) == (0.5, {"success": 0.0})


async def test_an_unreadable_call_is_told_and_the_last_turn_cuts_short(url: str):
    async with playing(url=url, turns=2) as (episode, _):
        told = await episode.step(Action("", (), "The call is no JSON."))
        end = await episode.step(calls(("add", {"first": 1, "second": 1})))

    assert (told.text, told.done) == ("The call is no JSON.", False)
    assert (end.done, end.truncated, end.tool_results[0].text) == (True, True, "2")


@pytest.mark.parametrize("server", [{"command": ["/no/such/server"]}, {"url": "http://127.0.0.1:1/mcp"}])
async def test_a_server_that_is_not_there_fails_the_episode_with_its_name(server: dict[str, Any]):
    with pytest.raises(EnvironmentFailed, match="no MCP server at"):
        async with playing(**server):
            pass


@pytest.mark.parametrize("settings", [{}, {"command": ["a"], "url": "b"}, {"url": "b", "task": "c:d"}])
async def test_either_and_or_are_refused(settings: dict[str, Any]):
    with pytest.raises(InvalidArgument, match="give one of command and url, and one of questions and task"):
        async with playing(**settings):
            pass


async def test_an_openenv_server_that_is_not_there_fails_the_episode_with_its_address():
    episode = Play(OpenEnv, {"url": "http://127.0.0.1:1"})

    with pytest.raises(EnvironmentFailed, match=r"no OpenEnv server answers at http://127\.0\.0\.1:1/ws"):
        await episode.reset(0, 0)
    await episode.close()
