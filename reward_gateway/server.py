"""RewardGatewayService: asks each of the domain's rewards, and adds up."""

import asyncio
from collections.abc import Mapping
from typing import Any

import prometheus_client
import structlog
from grpc import aio

from reward_gateway.pool import WorkerPool
from reward_gateway.scoring import External, Here, InWorker, Plan, Share, combine, shares_of
from rollfarm import reward, rpc
from rollfarm.errors import FarmError, RewardFailed
from rollfarm.reward import read_episode, read_score, score
from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc

log = structlog.get_logger()

SERVICE = "rollfarm.v1.RewardGatewayService"

SCORES = prometheus_client.Counter(
    "rollfarm_reward_gateway_scores_total", "Values asked of each reward, by result.", ["domain", "reward", "result"]
)
SECONDS = prometheus_client.Histogram(
    "rollfarm_reward_gateway_score_seconds",
    "Time to score an episode by all of its domain's rewards.",
    ["domain"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)


class RewardGatewayServicer(reward_gateway_pb2_grpc.RewardGatewayServiceServicer):
    """Scores episodes. `reward_gateway.wiring` makes it."""

    def __init__(
        self,
        plan: Plan,
        pool: WorkerPool | None,
        external: Mapping[str, Any],
        timeout: float,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._external = external
        self._timeout = timeout

    def register(self, server: aio.Server) -> None:
        reward_gateway_pb2_grpc.add_RewardGatewayServiceServicer_to_server(self, server)

    async def Score(self, request: reward_gateway_pb2.ScoreRequest, context: Any) -> reward_gateway_pb2.ScoreResponse:
        shares = shares_of(self._plan, request.episode.task.domain)
        with SECONDS.labels(request.episode.task.domain).time():
            if len(shares) == 1:
                return combine(shares, [await self._ask(shares[0], request.episode)])
            # Every reward is asked and settled, so that none is left running for an episode that failed already.
            answers = await asyncio.gather(
                *(self._ask(share, request.episode) for share in shares), return_exceptions=True
            )
        return combine(shares, [_value(answer) for answer in answers])

    async def _ask(self, share: Share, episode: reward_gateway_pb2.ScoredEpisode) -> reward.Score:
        try:
            verdict = await self._value(share, episode)
        except RewardFailed as failure:
            SCORES.labels(episode.task.domain, share.name, "failed").inc()
            log.warning("reward failed", domain=episode.task.domain, reward=share.name, cause=failure.problem)
            raise
        SCORES.labels(episode.task.domain, share.name, "scored").inc()
        return verdict

    async def _value(self, share: Share, episode: reward_gateway_pb2.ScoredEpisode) -> reward.Score:
        match share.where:
            case Here(function):
                try:
                    async with asyncio.timeout(self._timeout):
                        return await score(share.name, function, read_episode(episode))
                except TimeoutError:
                    raise RewardFailed(
                        f"Reward {share.name} gave no score in {self._timeout:g} s.", reward=share.name
                    ) from None
            case InWorker(name, settings):
                assert self._pool is not None
                return await self._pool.score(name, settings, episode, timeout=self._timeout)
            case External(address):
                return await self._ask_external(share.name, address, episode)

    async def _ask_external(self, name: str, address: str, episode: reward_gateway_pb2.ScoredEpisode) -> reward.Score:
        request = reward_gateway_pb2.RewardServiceScoreRequest(episode=episode, reward=name)
        try:
            answer = await rpc.call(self._external[address].Score, request, timeout=self._timeout)
        except RewardFailed:
            raise
        except FarmError as error:
            raise RewardFailed(f"External reward {name} at {address}: {error}", reward=name, address=address) from error
        return read_score(name, reward.Score(answer.value, answer.detail))


def _value(answer: reward.Score | BaseException) -> reward.Score:
    if isinstance(answer, BaseException):
        raise answer
    return answer
