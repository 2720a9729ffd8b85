"""The turn loop: reset, then generate and step until the environment or a limit ends it, then score.

An episode that fails is data: `play` raises EpisodeFailed with the outcome and the cause, whatever an environment, a
reward or llm_proxy did. A bug on its way fails it too, with a traceback in the log, and no other episode.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import prometheus_client
import structlog

from env_manager.rendering import Renderer, Span
from env_manager.transcript import Transcript, seed_of
from env_manager.worlds import World, Worlds
from rollfarm import foreign, telemetry, tokens
from rollfarm.errors import FarmError
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, reward_gateway_pb2, sample_buffer_pb2, trajectory_pb2

log = structlog.get_logger()

Generate = Callable[[llm_proxy_pb2.ProxiedGeneration], Awaitable[llm_proxy_pb2.GenerationResult]]
Score = Callable[[reward_gateway_pb2.ScoredEpisode], Awaitable[reward_gateway_pb2.ScoreResponse]]

OK = trajectory_pb2.OUTCOME_OK
TRUNCATED = trajectory_pb2.OUTCOME_TRUNCATED
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
    """Most tokens."""

    turns: int = 0
    """Most actions; 0 is without limit."""

    episode_seconds: float = 3600.0
    """Longest time."""

    turn_seconds: float = 300.0
    """Longest time of one generation, waiting included. A slower one aborts the episode."""


class Player:
    """Plays leased episodes, any number at once."""

    def __init__(
        self, renderer: Renderer, worlds: Worlds, generate: Generate, score: Score, limits: Limits, *, worker_id: str
    ) -> None:
        self._renderer = renderer
        self._worlds = worlds
        self._generate = generate
        self._score = score
        self._limits = limits
        self._worker_id = worker_id

    async def play(self, lease: sample_buffer_pb2.EpisodeLease) -> trajectory_pb2.Trajectory:
        """The finished and scored episode. Raises EpisodeFailed, and nothing else."""
        try:
            return await self._play(lease)
        except EpisodeFailed:
            raise
        except Exception as bug:
            log.exception("bug in an episode", lease_id=lease.lease_id)
            raise EpisodeFailed(ABORTED, f"Bug: {foreign.cause(bug)}.") from bug

    async def _play(self, lease: sample_buffer_pb2.EpisodeLease) -> trajectory_pb2.Trajectory:
        began = time.time()
        try:
            async with self._worlds.open(lease.lease_id, lease.episode.task) as world:
                transcript, limit = await self._converse(lease, world)
        except FarmError as error:
            raise EpisodeFailed(ENV_FAILED, str(error)) from error
        outcome = TRUNCATED if limit else OK
        try:
            score = await self._score(transcript.to_score(outcome))
        except FarmError as error:
            raise EpisodeFailed(REWARD_FAILED, str(error)) from error
        return transcript.finish(
            outcome,
            limit,
            score,
            trajectory_id=uuid.uuid4().hex,
            worker_id=self._worker_id,
            began=began,
            ended=time.time(),
        )

    async def _converse(self, lease: sample_buffer_pb2.EpisodeLease, world: World) -> tuple[Transcript, str]:
        """Take turns. Returns with the limit that cut in, or with "" when the environment was done."""
        shown = await world.reset()
        transcript = Transcript(lease.episode, shown)
        spans = self._renderer.opening(shown)
        try:
            async with asyncio.timeout(self._limits.episode_seconds):
                while not (limit := self._limit(transcript, spans)):
                    transcript.show(spans)
                    result, action = await self._act(lease, transcript)
                    transcript.act(result, action)
                    asked = time.perf_counter()
                    step = await world.step(action)
                    transcript.answer(step, world.environment_id, time.perf_counter() - asked)
                    TURNS.inc()
                    if step.done or step.truncated:
                        return transcript, "a limit of the environment" if step.truncated else ""
                    last_token = tokens.unpack_ids(result.token_ids)[-1]
                    spans = (self._renderer.continuation(step.text, int(last_token)),)
        except TimeoutError:
            limit = f"the limit of {self._limits.episode_seconds:g} s"
        if not transcript.action_count:
            raise EpisodeFailed(ABORTED, f"The policy had not acted at {limit}.")
        return transcript, limit

    def _limit(self, transcript: Transcript, spans: Sequence[Span]) -> str:
        if 0 < self._limits.turns <= transcript.action_count:
            return f"the limit of {self._limits.turns} turns"
        if self._room(transcript, spans) < 1:
            return f"the limit of {self._limits.context_tokens} tokens"
        return ""

    def _room(self, transcript: Transcript, spans: Sequence[Span] = ()) -> int:
        """Tokens that the policy may write after `spans`."""
        shown = sum(tokens.token_count(span.token_ids) for span in spans)
        return self._limits.context_tokens - transcript.token_count - shown

    async def _act(
        self, lease: sample_buffer_pb2.EpisodeLease, transcript: Transcript
    ) -> tuple[llm_proxy_pb2.GenerationResult, str]:
        """What the policy writes next, as tokens and as words."""
        try:
            async with asyncio.timeout(self._limits.turn_seconds):
                result = await self._generate(self._request(lease, transcript))
        except FarmError as error:
            raise EpisodeFailed(ABORTED, str(error)) from error
        except TimeoutError:
            raise EpisodeFailed(ABORTED, f"No generation in {self._limits.turn_seconds:g} s.") from None
        count = tokens.token_count(result.token_ids)
        if result.finish_reason not in (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH):
            raise EpisodeFailed(ABORTED, f"The generation was aborted after {count} tokens.")
        if not count or tokens.token_count(result.logprobs) != count:
            given = tokens.token_count(result.logprobs)
            raise EpisodeFailed(ABORTED, f"The generation has {count} tokens and {given} log-probabilities.")
        TOKENS.inc(count)
        return result, self._renderer.decode(result.token_ids)

    def _request(
        self, lease: sample_buffer_pb2.EpisodeLease, transcript: Transcript
    ) -> llm_proxy_pb2.ProxiedGeneration:
        episode = lease.episode
        sampling = trajectory_pb2.Sampling()
        sampling.CopyFrom(episode.sampling)
        sampling.max_tokens = min(sampling.max_tokens, self._room(transcript))
        sampling.stop_token_ids.extend(self._renderer.stop_token_ids)
        sampling.seed = seed_of(episode, transcript.action_count)
        return llm_proxy_pb2.ProxiedGeneration(
            generation=engine_pb2.Generation(
                request_id=f"{lease.lease_id}/{transcript.action_count}",
                prompt_token_ids=transcript.prompt,
                sampling=sampling,
                session_id=lease.lease_id,
                trace_id=telemetry.trace_id.get(),
            ),
            min_version=episode.policy_version,
            priority=episode.policy_version,
        )
