"""Plays an episode: the turn loop (reset, then generate and step until the environment or a limit ends it), then score.

An episode that fails is data: `play` raises EpisodeFailed with the outcome and the cause, whatever an environment, a
reward or llm_proxy did. A bug on its way fails it too, with a traceback in the log, and no other episode.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import prometheus_client
import structlog

from env_manager.rendering import Prompt, Renderer
from env_manager.transcript import Played, Transcript, seed_of
from env_manager.worlds import World, Worlds
from rollfarm import foreign, telemetry, tokens
from rollfarm.errors import EnvironmentFailed, FarmError
from rollfarm.v1 import llm_proxy_pb2, reward_gateway_pb2, sample_buffer_pb2, trajectory_pb2

log = structlog.get_logger()

Generate = Callable[[llm_proxy_pb2.ProxiedGeneration], Awaitable[llm_proxy_pb2.GenerationResult]]
Score = Callable[
    [reward_gateway_pb2.ScoredEpisode, sample_buffer_pb2.Episode], Awaitable[reward_gateway_pb2.ScoreResponse]
]

Converse = Callable[[sample_buffer_pb2.EpisodeLease, World], Awaitable[Played]]
"""Has the conversation of one episode, from the environment's reset to the end."""

ENV_FAILED = trajectory_pb2.OUTCOME_ENV_FAILED
REWARD_FAILED = trajectory_pb2.OUTCOME_REWARD_FAILED
ABORTED = trajectory_pb2.OUTCOME_ABORTED

TURNS = prometheus_client.Counter("rollfarm_env_manager_turns_total", "Actions that environments answered.")
TOKENS = prometheus_client.Counter("rollfarm_env_manager_policy_tokens_total", "Tokens that the policy wrote.")


class EpisodeFailed(Exception):
    """The episode cannot be trained on."""

    def __init__(self, outcome: "trajectory_pb2.Outcome.ValueType", detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


@dataclass(frozen=True)
class Limits:
    """What ends an episode early. It is scored as it is."""

    context_tokens: int
    """Most tokens that the policy sees and writes in one segment."""

    turns: int = 0
    """Most actions; 0 is without limit."""

    episode_seconds: float = 3600.0
    """Longest time."""


class Player:
    """Plays leased episodes, any number at once."""

    def __init__(
        self,
        worlds: Worlds,
        converse: Converse,
        score: Score,
        *,
        worker_id: str,
        agents: Mapping[str, Converse] | None = None,
    ) -> None:
        """`agents` have the conversations of the domains that they are named for, and `converse` all others."""
        self._worlds = worlds
        self._converse = converse
        self._score = score
        self._worker_id = worker_id
        self._agents = agents or {}

    async def play(
        self, lease: sample_buffer_pb2.EpisodeLease, played: Callable[[], None]
    ) -> trajectory_pb2.Trajectory:
        """The finished and scored episode. Raises EpisodeFailed, and nothing else.

        `played` is called when the conversation is over and only the score is awaited, which may take as long as the
        siblings do. It is not called where the conversation fails.
        """
        try:
            return await self._play(lease, played)
        except EpisodeFailed:
            raise
        except Exception as bug:
            log.exception("bug in an episode", lease_id=lease.lease_id)
            raise EpisodeFailed(ABORTED, f"Bug: {foreign.cause(bug)}.") from bug

    async def _play(
        self, lease: sample_buffer_pb2.EpisodeLease, played: Callable[[], None]
    ) -> trajectory_pb2.Trajectory:
        began, task = time.time(), lease.episode.task
        converse = self._agents.get(task.domain, self._converse)
        try:
            async with self._worlds.open(lease.lease_id, task) as world:
                conversation = await converse(lease, world)
        except FarmError as error:
            raise EpisodeFailed(ENV_FAILED, str(error)) from error
        played()
        try:
            score = await self._score(conversation.to_score(), lease.episode)
        except FarmError as error:
            raise EpisodeFailed(REWARD_FAILED, str(error)) from error
        return conversation.finish(
            score, trajectory_id=uuid.uuid4().hex, worker_id=self._worker_id, began=began, ended=time.time()
        )


class TurnLoop:
    """Lets the policy and the environment take turns."""

    def __init__(self, renderer: Renderer, generate: Generate, limits: Limits) -> None:
        self._renderer = renderer
        self._generate = generate
        self._limits = limits

    async def converse(self, lease: sample_buffer_pb2.EpisodeLease, world: World) -> Played:
        """Until the environment is done or a limit cuts in."""
        shown = await world.reset()
        transcript = Transcript(lease.episode, shown)
        conversation = self._renderer.begin(shown)
        prompt = await conversation.opening()
        self._check_fits(prompt)
        try:
            async with asyncio.timeout(self._limits.episode_seconds):
                while not (limit := self._limit(transcript, prompt)):
                    transcript.show(prompt)
                    result = await self._generated(lease, transcript)
                    reply = conversation.read(result.token_ids)
                    transcript.act(result, reply.text)
                    asked = time.perf_counter()
                    step = await world.step(reply.action)
                    transcript.answer(step, world.environment_id, time.perf_counter() - asked)
                    TURNS.inc()
                    if step.done or step.truncated:
                        return transcript.end("a limit of the environment" if step.truncated else "")
                    prompt = await conversation.answer(step)
        except TimeoutError:
            limit = f"the limit of {self._limits.episode_seconds:g} s"
        if not transcript.action_count:
            raise EpisodeFailed(ABORTED, f"The policy had not acted at {limit}.")
        return transcript.end(limit)

    def _check_fits(self, opening: Prompt) -> None:
        count, room = opening.token_count, self._limits.context_tokens
        if count >= room:
            raise EnvironmentFailed(
                f"The environment begins with {count} tokens, and the context has {room}.", count=count, room=room
            )

    def _limit(self, transcript: Transcript, prompt: Prompt) -> str:
        if 0 < self._limits.turns <= transcript.action_count:
            return f"the limit of {self._limits.turns} turns"
        shown = 0 if prompt.begins_segment else transcript.token_count
        if shown + prompt.token_count >= self._limits.context_tokens:
            return f"the limit of {self._limits.context_tokens} tokens"
        return ""

    async def _generated(
        self, lease: sample_buffer_pb2.EpisodeLease, transcript: Transcript
    ) -> llm_proxy_pb2.GenerationResult:
        """What the policy writes next."""
        try:
            result = await self._generate(self._request(lease, transcript))
        except (FarmError, TimeoutError) as error:
            raise EpisodeFailed(ABORTED, str(error)) from error
        count = tokens.token_count(result.token_ids)
        if result.finish_reason not in (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH):
            raise EpisodeFailed(ABORTED, f"The generation was aborted after {count} tokens.")
        if not count or tokens.token_count(result.logprobs) != count:
            given = tokens.token_count(result.logprobs)
            raise EpisodeFailed(ABORTED, f"The generation has {count} tokens and {given} log-probabilities.")
        TOKENS.inc(count)
        return result

    def _request(
        self, lease: sample_buffer_pb2.EpisodeLease, transcript: Transcript
    ) -> llm_proxy_pb2.ProxiedGeneration:
        episode = lease.episode
        request = llm_proxy_pb2.ProxiedGeneration(min_version=episode.policy_version, priority=episode.policy_version)
        generation = request.generation  # filled in place: a message that is handed over is copied, images and all
        generation.request_id = f"{lease.lease_id}/{transcript.action_count}"
        generation.prompt_token_ids = transcript.prompt
        generation.session_id = lease.lease_id
        generation.trace_id = telemetry.trace_id.get()
        generation.images.extend(transcript.images)
        sampling = generation.sampling
        sampling.CopyFrom(episode.sampling)
        sampling.max_tokens = min(sampling.max_tokens, self._limits.context_tokens - transcript.token_count)
        sampling.stop_token_ids.extend(self._renderer.stop_token_ids)
        sampling.seed = seed_of(episode, transcript.action_count)
        return request
