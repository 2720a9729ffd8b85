"""Whole episodes of agents as they are: real processes, real sockets, and llm_proxy's own front door."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rollfarm import tokens
from rollfarm.env import Environment, Observation, Step
from rollfarm.testing import SimulatedEngine, simulated_logprob
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeRewards, episode, working
from tests.llm_proxy import models
from tests.llm_proxy.fronts import POLICY, scripted

HERE = Path(__file__).parent
ENVIRONMENT = trajectory_pb2.AUTHOR_ENVIRONMENT
FAILED = trajectory_pb2.OUTCOME_ENV_FAILED

ASK = """
import json, os, sys, urllib.request
def ask(*said):
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(said)]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
"""
"""For agents of one line, which shall start fast."""


class Riddle(Environment):
    """Judges the whole conversation."""

    def reset(self, seed: int, index: int) -> Observation:
        return Observation("Where do you live?", system="Be brief.", reference="Paris")

    def step(self, action: str) -> Step:
        raise AssertionError("An agent's episode has no step.")

    def score(self, turns: Any, answer: str) -> Step:
        said = [turn.text for turn in turns if turn.author == "policy"]
        success = float(answer == "Paris")
        return Step(f"after {len(said)} turns", reward=success / 2, metrics={"success": success})


RIDDLE = f"{__name__}:Riddle"


def agent(program: str, **more: Any) -> dict[str, Any]:
    return {"play": {"command": [sys.executable, "-I", "-S", "-c", ASK + program], "seconds": 60, **more}}


def sdk_agent(file: str) -> dict[str, Any]:
    return {"play": {"command": [sys.executable, str(HERE / file)], "seconds": 60}}


async def play(
    proxy: Any, agents: dict[str, Any], leased: sample_buffer_pb2.Episode | None = None
) -> tuple[FakeBuffer, FakeRewards]:
    """The buffer and the gateway after one episode."""
    buffer, rewards = FakeBuffer(), FakeRewards()
    buffer.add(leased or episode(RIDDLE, max_tokens=100))
    async with working(buffer, proxy.address, rewards, agents=agents):
        await buffer.until(lambda: bool(buffer.completed or buffer.failed), 60)
    return buffer, rewards


def completed(buffer: FakeBuffer) -> trajectory_pb2.Trajectory:
    assert not buffer.failed, [failed.detail for failed in buffer.failed.values()]
    (trajectory,) = buffer.completed.values()
    return trajectory


def failure(buffer: FakeBuffer) -> tuple[int, str]:
    assert not buffer.completed
    (failed,) = buffer.failed.values()
    return failed.outcome, failed.detail


def assert_trains_on_what_the_engine_made(trajectory: trajectory_pb2.Trajectory, script: models.Script) -> None:
    """Each policy turn is what the engine made of the tokens of its segment before it, and none is left out."""
    made = {tuple(prompt): script.answer(prompt) for prompt in script.prompts}
    before: list[int] = []
    for number, turn in enumerate(trajectory.turns):
        ids = tokens.unpack_ids(turn.token_ids).tolist()
        if turn.begins_segment or number == 0:
            before = []
        if turn.author == POLICY:
            assert ids == made.pop(tuple(before))
            versions = tokens.versions_of(turn.version_spans).tolist()
            expected = [simulated_logprob(token, version) for token, version in zip(ids, versions, strict=True)]
            assert tokens.unpack_logprobs(turn.logprobs).tolist() == expected
        before += ids
    assert not made


async def test_an_openai_agent_that_calls_tools_is_a_trajectory_that_the_environment_judges():
    def write(prompt: str) -> str:
        if "<tool_response>" not in prompt:
            question = re.findall(r"what is (\d+ \w+ \d+)", prompt)[0]
            call = f'{{"name": "calculate", "arguments": {{"question": "{question}"}}}}'
            return f"<tool_call>\n{call}\n</tool_call><|im_end|>"
        return re.findall(r"<tool_response>\n(-?\d+)", prompt)[0] + "<|im_end|>"

    async with scripted(write) as (proxy, script):
        buffer, rewards = await play(proxy, sdk_agent("tool_agent.py"), episode("arithmetic", max_tokens=100))

        trajectory = completed(buffer)
        assert_trains_on_what_the_engine_made(trajectory, script)
        assert [turn.author == POLICY for turn in trajectory.turns] == [False, False, True, False, True]
        assert trajectory.outcome == trajectory_pb2.OUTCOME_OK
        assert (trajectory.reward, dict(trajectory.metrics)) == (1.0, {"success": 1.0})
        assert [turn.step_reward for turn in trajectory.turns if turn.HasField("step_reward")] == [1.0]
        assert trajectory.turns[-1].step_reward == 1.0
        assert trajectory.turns[-1].environment_id == "worker-1"
        assert rewards.asked[0].turns[-1].text == rewards.asked[0].reference


async def test_an_anthropic_agent_is_one_too():
    async with scripted(lambda prompt: ("Paris" if "sure" in prompt else "Rome") + "<|im_end|>") as (proxy, script):
        buffer, rewards = await play(proxy, sdk_agent("anthropic_agent.py"))

        trajectory = completed(buffer)
        assert_trains_on_what_the_engine_made(trajectory, script)
        assert "Be brief.\n\nWhere do you live?" in trajectory.turn_texts[0]
        assert (trajectory.reward, dict(trajectory.metrics)) == (0.5, {"success": 1.0})
        assert rewards.asked[0].turns[-1].text == "after 2 turns"


async def test_an_agent_that_rewrites_its_history_trains_each_token_once():
    program = 'ask("one"); ask("one", "Paris", "two"); ask("one", "Paris", "three"); print(ask("all anew"))'
    async with scripted(lambda prompt: "Paris<|im_end|>") as (proxy, script):
        buffer, _ = await play(proxy, agent(program))

        trajectory = completed(buffer)
        assert_trains_on_what_the_engine_made(trajectory, script)
        assert [turn.begins_segment for turn in trajectory.turns] == [False] * 4 + [True, False] * 2
        assert trajectory.turns[4].author == ENVIRONMENT
        assert sum(turn.author == POLICY for turn in trajectory.turns) == len(script.prompts) == 4


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("ask('x'); sys.exit('no luck')", "The agent ended with exit status 1: no luck"),
        ("print('Paris')", "The agent ended without asking for a generation."),
        ("ask('x'); os.abort()", "The agent ended with exit status 134"),
    ],
)
async def test_an_agent_that_fails_fails_its_episode_with_the_cause(program: str, cause: str):
    async with scripted(lambda prompt: "Paris<|im_end|>") as (proxy, _):
        outcome, detail = failure((await play(proxy, agent(program)))[0])

        assert outcome == FAILED
        assert cause in detail
        assert proxy.front.sessions.open_count == 1, "that of the fixture"


async def test_an_agent_that_hangs_is_scored_as_it_is_where_the_policy_has_acted():
    program = 'print(ask("x"), flush=True)\nimport time\ntime.sleep(1000)'
    async with scripted(lambda prompt: "Paris<|im_end|>") as (proxy, script):
        buffer, _ = await play(proxy, agent(program, seconds=2.0))

        trajectory = completed(buffer)
        assert trajectory.outcome == trajectory_pb2.OUTCOME_TRUNCATED
        assert trajectory.outcome_detail == "the limit of 2 s"
        assert trajectory.reward == 0.5
        assert_trains_on_what_the_engine_made(trajectory, script)


async def test_an_agent_that_hangs_without_having_acted_fails():
    async with scripted(lambda prompt: "Paris<|im_end|>") as (proxy, _):
        outcome, detail = failure((await play(proxy, agent("import time; time.sleep(1000)", seconds=0.3)))[0])

        assert (outcome, "asked for no generation in 0.3 s" in detail) == (FAILED, True)


async def test_an_agent_is_only_answered_under_its_lease_s_version_or_a_newer_one():
    async with scripted(lambda prompt: "Paris<|im_end|>") as (proxy, script):
        leased = episode(RIDDLE, version=1, max_tokens=100)
        outcome, detail = failure((await play(proxy, agent("print(ask('x'))", seconds=1.5), leased))[0])

        assert script.prompts == []
        assert (outcome, "asked for no generation" in detail) == (FAILED, True)


async def test_a_cancelled_episode_closes_its_session_and_nothing_is_generated_for_it_any_more():
    engine = SimulatedEngine(token_limit=0)
    async with scripted(lambda prompt: "Paris<|im_end|>", engine=engine) as (proxy, _):
        buffer = FakeBuffer()
        buffer.add(episode(RIDDLE, max_tokens=100))
        async with working(buffer, proxy.address, agents=agent("ask('x')")):
            await engine.until(lambda: bool(engine.open_requests))

        assert proxy.front.sessions.open_count == 1
        await engine.until(lambda: not engine.open_requests)


async def test_an_environment_that_fails_to_judge_fails_the_episode():
    async with scripted(lambda prompt: "Paris<|im_end|>") as (proxy, _):
        leased = episode(f"{__name__}:Unjust", max_tokens=100)
        outcome, detail = failure((await play(proxy, agent("print(ask('x'))"), leased))[0])

        assert (outcome, "score raised RuntimeError: no verdict" in detail) == (FAILED, True)


class Unjust(Riddle):
    """Cannot judge."""

    def score(self, turns: Any, answer: str) -> Step:
        raise RuntimeError("no verdict")
