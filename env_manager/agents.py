"""Agents that play episodes by themselves: an unmodified program, started for each episode, before llm_proxy's HTTP.

The environment's reset gives the task, which the agent reads from its stdin. Its base URL and its key open a session at
llm_proxy, which records every token; what it prints is its answer, and the environment's score judges it.

An agent that exits with an error, asks for no generation or cannot be started fails its episode with AgentFailed. One
that is not done in time is killed, and scored as it is where the policy has acted.
"""

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog

from env_manager.agent_config import AgentConfig
from env_manager.agent_process import ProcessRunner
from env_manager.episodes import ABORTED, TOKENS, Converse, EpisodeFailed
from env_manager.recorded import POLICY, Recorded, read_record
from env_manager.runners import Ran, Runner
from env_manager.transcript import Played, seed_of
from env_manager.worlds import World
from rollfarm import reward, rpc, times, tokens
from rollfarm.env import Observation
from rollfarm.errors import AgentFailed, EnvironmentFailed, FarmError
from rollfarm.v1 import llm_proxy_pb2, sample_buffer_pb2, trajectory_pb2

log = structlog.get_logger()

SESSION_SECONDS = 60.0
"""How long llm_proxy may take to open or close a session, its restarts included. A session that is never closed is
forgotten this long after the agent's time."""

ABANDON_SECONDS = 2.0
"""The same, where nobody needs the record any more."""


def agents_of(configs: Mapping[str, AgentConfig], stub: Any) -> dict[str, Converse]:
    """By domain, what has its conversations. `stub` is an LlmProxyServiceStub on an aio channel."""
    return {domain: Agent(stub, _runner(config), seconds=config.seconds).converse for domain, config in configs.items()}


def _runner(config: AgentConfig) -> Runner:
    inherited = {name: os.environ[name] for name in config.inherits if name in os.environ}
    variables = {**inherited, **config.environment}
    if not config.image:
        return ProcessRunner(config.command, variables, output_bytes=config.output_bytes)
    # Here, because whoever has no image needs no docker.
    from env_manager.agent_container import ContainerRunner

    return ContainerRunner(config, variables)


class Agent:
    """Has the conversations of one domain."""

    def __init__(self, stub: Any, runner: Runner, *, seconds: float) -> None:
        """`stub` is an LlmProxyServiceStub on an aio channel."""
        self._stub = stub
        self._runner = runner
        self._seconds = seconds

    async def converse(self, lease: sample_buffer_pb2.EpisodeLease, world: World) -> Played:
        """Run the agent and have the environment judge it."""
        shown = await world.reset()
        if shown.images:
            raise EnvironmentFailed("The environment shows images, and an agent is given text. Play it without agents.")
        async with self._session(lease) as session:
            ran = await self._runner.run(task_text(shown), variables_of(session), self._seconds)
            recorded = read_record(await self._close(lease.lease_id, SESSION_SECONDS))
        last = recorded.last_act
        if last is None or ran.status:
            raise AgentFailed(_failure(ran, self._seconds))
        TOKENS.inc(sum(tokens.token_count(turn.token_ids) for turn in recorded.turns if turn.author == POLICY))
        limit = f"the limit of {self._seconds:g} s" if ran.status is None else ""
        return await _judged(lease.episode, shown, recorded, last, ran.answer, limit, world)

    @asynccontextmanager
    async def _session(self, lease: sample_buffer_pb2.EpisodeLease) -> AsyncIterator[llm_proxy_pb2.OpenSessionResponse]:
        """A session that is closed in any case, so that nothing is generated for an agent that is gone."""
        try:
            yield await self._open(lease)
        except BaseException:
            try:
                await self._close(lease.lease_id, ABANDON_SECONDS)
            except EpisodeFailed as failed:
                log.warning("session not closed; it expires", session_id=lease.lease_id, cause=failed.detail)
            raise

    async def _open(self, lease: sample_buffer_pb2.EpisodeLease) -> llm_proxy_pb2.OpenSessionResponse:
        try:
            return await rpc.call(self._stub.OpenSession, opening(lease, self._seconds), timeout=SESSION_SECONDS)
        except FarmError as error:
            raise EpisodeFailed(ABORTED, str(error)) from error

    async def _close(self, session_id: str, seconds: float) -> llm_proxy_pb2.SessionRecord:
        request = llm_proxy_pb2.CloseSessionRequest(session_id=session_id)
        try:
            return (await rpc.call(self._stub.CloseSession, request, timeout=seconds)).record
        except FarmError as error:
            raise EpisodeFailed(ABORTED, str(error)) from error


def opening(lease: sample_buffer_pb2.EpisodeLease, seconds: float) -> llm_proxy_pb2.OpenSessionRequest:
    """What the agent's session may do: sample as the run does, under no older weights than the lease's."""
    episode = lease.episode
    sampling = trajectory_pb2.Sampling()
    sampling.CopyFrom(episode.sampling)
    sampling.seed = seed_of(episode, 0)
    return llm_proxy_pb2.OpenSessionRequest(
        session_id=lease.lease_id,
        sampling=sampling,
        priority=episode.policy_version,
        min_version=episode.policy_version,
        idle_duration=times.duration(seconds + SESSION_SECONDS),
    )


def task_text(shown: Observation) -> str:
    """What the agent reads: the environment's instructions where there are any, an empty line, and the task."""
    return f"{shown.system}\n\n{shown.text}" if shown.system else shown.text


def variables_of(session: llm_proxy_pb2.OpenSessionResponse) -> dict[str, str]:
    """What the SDKs of OpenAI and Anthropic read by themselves, and the model's name."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model_name,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_MODEL": session.model_name,
    }


async def _judged(
    episode: sample_buffer_pb2.Episode,
    shown: Observation,
    recorded: Recorded,
    last: trajectory_pb2.Turn,
    answer: str,
    limit: str,
    world: World,
) -> Played:
    """The episode with the environment's verdict, which its last act is paid for."""
    said = Played(episode, recorded.turns, recorded.texts, limit=limit, reference=shown.reference)
    asked = time.perf_counter()
    step = await world.score(reward.read_episode(said.to_score()).turns, answer)
    last.step_reward = step.reward
    last.environment_id = world.environment_id
    last.environment_duration.CopyFrom(times.duration(time.perf_counter() - asked))
    return replace(said, metrics=step.metrics, last_words=step.text)


def _failure(ran: Ran, seconds: float) -> str:
    """Why the episode is worth nothing, in words."""
    if ran.status:
        problem = f"The agent ended with exit status {ran.status}"
    elif ran.status is None:
        problem = f"The agent asked for no generation in {seconds:g} s"
    else:
        problem = "The agent ended without asking for a generation"
    return f"{problem}: {ran.complaint}" if ran.complaint else f"{problem}."
