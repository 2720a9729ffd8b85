"""Asks one reward of one domain: remembered, in time, again where that may help, and counted."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from reward_gateway.memory import Memory, key_of
from reward_gateway.pool import WorkerPool
from reward_gateway.scoring import External, Here, InWorker, Share
from reward_gateway.timeouts import Late, Timeout, timed
from rollfarm import rpc
from rollfarm.errors import DeadlineExceeded, FarmError, RewardFailed, Unavailable
from rollfarm.reward import Score, TryAgain, may_pass, read_episode, read_score, score, score_group, unpack_scores
from rollfarm.v1 import reward_gateway_pb2

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.2
"""The rest before the second attempt; each later rest is twice as long."""

Episodes = Sequence[reward_gateway_pb2.ScoredEpisode]

Attempt = Callable[[Episodes], Awaitable[list[Score]]]
"""A score for each episode, within the reward's time, of which it is told. Raises RewardFailed."""


@dataclass(slots=True)
class Tally:
    """How one reward of one domain fares."""

    scored: int = 0
    """Values that it gave."""

    cached: int = 0
    """Values that were remembered instead."""

    failed: int = 0
    """Values that it failed to give, retries included."""

    cause: str = ""
    """Of the latest failure."""


class Asker:
    """Of one share of one domain."""

    def __init__(
        self, domain: str, share: Share, attempt: Attempt, timeout: Timeout, memory: Memory, *, retries: int
    ) -> None:
        self.share = share
        self.timeout = timeout
        self.tally = Tally()
        self._domain = domain
        self._attempt = attempt
        self._memory = memory
        self._retries = retries

    async def ask(self, episode: reward_gateway_pb2.ScoredEpisode) -> Score:
        """The episode's score. Raises RewardFailed."""
        if self.share.remembered is None:
            return (await self.compare([episode]))[0]
        key = key_of(self.share.name, self.share.remembered, episode)
        known = self._memory.get(key)
        if known is not None:
            self.tally.cached += 1
            return known
        fresh = (await self.compare([episode]))[0]
        self._memory.put(key, fresh)
        return fresh

    async def compare(self, episodes: Episodes) -> list[Score]:
        """A score for each. Raises RewardFailed."""
        try:
            scores = await self._persist(episodes)
        except RewardFailed as failure:
            self.tally.failed += len(episodes)
            self.tally.cause = failure.problem
            log.warning("reward failed", domain=self._domain, reward=self.share.name, cause=failure.problem)
            raise
        self.tally.scored += len(scores)
        return scores

    async def _persist(self, episodes: Episodes) -> list[Score]:
        rest = FIRST_RETRY_SECONDS
        for _ in range(self._retries):
            try:
                return await self._attempt(episodes)
            except RewardFailed as failure:
                if not may_pass(failure):
                    raise
            await asyncio.sleep(rest * random.uniform(0.5, 1))
            rest *= 2
        return await self._attempt(episodes)


def attempt_of(share: Share, timeout: Timeout, pool: WorkerPool | None, external: Mapping[str, Any]) -> Attempt:
    """How the share's reward is asked once."""
    match share.where:
        case Here():
            return _here(share, share.where, timeout)
        case InWorker(name, settings):
            assert pool is not None
            return lambda episodes: pool.score(name, settings, episodes, timeout)
        case External(address):
            return _external(share, address, external[address], timeout)


def _here(share: Share, where: Here, timeout: Timeout) -> Attempt:
    async def attempt(episodes: Episodes) -> list[Score]:
        read = [read_episode(episode) for episode in episodes]
        with timed(timeout) as seconds:
            try:
                async with asyncio.timeout(seconds):
                    if share.compares:
                        return await score_group(share.name, where.function, read)
                    return [await score(share.name, where.function, episode) for episode in read]
            except TimeoutError:
                raise Late(f"Reward {share.name} gave no score in {seconds:g} s.", reward=share.name) from None

    return attempt


def _external(share: Share, address: str, stub: Any, timeout: Timeout) -> Attempt:
    async def ask(episodes: Episodes, seconds: float) -> list[Score]:
        if share.compares:
            request = reward_gateway_pb2.ScoreGroupRequest(episodes=episodes, reward=share.name)
            answer = await rpc.call(stub.ScoreGroup, request, timeout=seconds)
            return unpack_scores(share.name, answer, len(episodes))
        request = reward_gateway_pb2.RewardServiceScoreRequest(episode=episodes[0], reward=share.name)
        answer = await rpc.call(stub.Score, request, timeout=seconds)
        return [read_score(share.name, Score(answer.value, answer.detail))]

    async def attempt(episodes: Episodes) -> list[Score]:
        with timed(timeout) as seconds:
            try:
                return await ask(episodes, seconds)
            except RewardFailed:
                raise
            except FarmError as error:
                problem = f"External reward {share.name} at {address}: {error}"
                facts = {"reward": share.name, "address": address}
                if isinstance(error, DeadlineExceeded):
                    raise Late(problem, **facts, again=True) from error
                raise (TryAgain if isinstance(error, Unavailable) else RewardFailed)(problem, **facts) from error

    return attempt
