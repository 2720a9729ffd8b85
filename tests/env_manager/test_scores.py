"""Episodes that wait for their scores."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from env_manager.scores import Scores
from rollfarm import rpc
from rollfarm.errors import DeadlineExceeded, RewardFailed
from rollfarm.v1 import reward_gateway_pb2 as pb
from rollfarm.v1 import reward_gateway_pb2_grpc, trajectory_pb2
from tests.env_manager.fakes import FakeRewards, serving


class PickyRewards(FakeRewards):
    """Keeps members of 10 and more waiting, and fails negative ones."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        if request.member < 0:
            raise RewardFailed("It is negative.")
        if request.member >= 10:
            await self.go.wait()
        return pb.ScoreResponse(reward=request.member)


@asynccontextmanager
async def asking(address: str, *, seconds: float = 20.0) -> AsyncIterator[Scores]:
    async with rpc.channel(address) as channel:
        scores = Scores(reward_gateway_pb2_grpc.RewardGatewayServiceStub(channel), seconds=seconds)
        running = asyncio.create_task(scores.run())
        yield scores
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def ask(scores: Scores, member: int, *, text: str = "") -> "asyncio.Task[pb.ScoreResponse]":
    episode = pb.ScoredEpisode(turns=[trajectory_pb2.ScoredTurn(text=text)])
    return asyncio.create_task(scores.ask(pb.ScoreRequest(episode=episode, member=member)))


async def test_episodes_that_end_together_are_one_call_and_a_failure_is_of_its_own_episode() -> None:
    rewards = PickyRewards()
    async with serving(rewards.register) as address, asking(address) as scores:
        answers = await asyncio.gather(*(ask(scores, member) for member in (1, -1, 2)), return_exceptions=True)

    assert rewards.calls == [[1, -1, 2]]
    assert [answer.reward for answer in answers if isinstance(answer, pb.ScoreResponse)] == [1.0, 2.0]
    assert isinstance(answers[1], RewardFailed)


async def test_a_slow_score_keeps_no_other_waiting_of_its_call_or_the_next() -> None:
    rewards = PickyRewards()
    async with serving(rewards.register) as address, asking(address) as scores:
        slow, quick = ask(scores, 10), ask(scores, 1)
        found = [(await quick).reward, (await ask(scores, 2)).reward]
        was_done = slow.done()
        rewards.go.set()
        found.append((await slow).reward)

    assert (found, was_done) == ([1.0, 2.0, 10.0], False)
    assert rewards.calls == [[10, 1], [2]]


async def test_one_that_nobody_waits_for_any_more_is_cancelled_and_spoils_no_other() -> None:
    rewards = PickyRewards()
    async with serving(rewards.register) as address, asking(address) as scores:
        given_up, other = ask(scores, 10), ask(scores, 11)
        await ask(scores, 1)
        given_up.cancel()
        await rewards.until(lambda: rewards.cancelled == [10])
        rewards.go.set()
        answer = await other

    assert (given_up.cancelled(), answer.reward) == (True, 11.0)


async def test_what_nobody_waits_for_any_more_is_not_asked() -> None:
    rewards = PickyRewards()
    async with serving(rewards.register) as address, asking(address) as scores:
        given_up, other = ask(scores, 1), ask(scores, 2)
        await asyncio.sleep(0)
        given_up.cancel()
        await other

    assert rewards.calls == [[2]]


async def test_a_call_of_which_nothing_is_wanted_ends_and_is_not_made_again() -> None:
    rewards = PickyRewards()
    async with serving(rewards.register) as address, asking(address) as scores:
        given_up = [ask(scores, 10), ask(scores, 11)]
        await ask(scores, 1)
        for each in given_up:
            each.cancel()
        await rewards.until(lambda: len(rewards.cancelled) == 2)
        await ask(scores, 2)

    assert (rewards.calls, sorted(rewards.cancelled)) == ([[10, 11, 1], [2]], [10, 11])


async def test_what_was_not_answered_is_asked_of_the_gateway_that_serves_next() -> None:
    first, second = PickyRewards(), PickyRewards()
    second.go.set()
    async with AsyncExitStack() as life:
        address = await life.enter_async_context(serving(first.register))
        async with asking(address) as scores:
            slow, quick = ask(scores, 10), ask(scores, 1)
            await quick
            await life.aclose()
            async with serving(second.register, int(address.rpartition(":")[2])):
                answer = await slow

    assert (answer.reward, first.calls, second.calls) == (10.0, [[10, 1]], [[10]])


class OldRewards(FakeRewards):
    """Has only the calls of an earlier version."""

    async def ScoreMany(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ScoreManyResponse]:
        self.calls.append([])
        self.changed.notify()
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield pb.ScoreManyResponse()


async def test_a_gateway_that_does_not_know_the_call_yet_is_asked_again_until_it_is_upgraded() -> None:
    old, new = OldRewards(), PickyRewards()
    async with AsyncExitStack() as life:
        address = await life.enter_async_context(serving(old.register))
        async with asking(address) as scores:
            answer = ask(scores, 1)
            await old.until(lambda: old.calls != [])
            await life.aclose()
            async with serving(new.register, int(address.rpartition(":")[2])):
                assert (await answer).reward == 1.0


async def test_without_an_answer_in_time_each_is_told_so() -> None:
    async with serving(PickyRewards().register) as address, asking(address, seconds=0.3) as scores:
        slow, quick = ask(scores, 10), ask(scores, 1)
        assert (await quick).reward == 1.0
        with pytest.raises(DeadlineExceeded):
            await slow


async def test_a_call_is_of_moderate_size() -> None:
    rewards = PickyRewards()
    async with serving(rewards.register) as address, asking(address) as scores:
        texts = enumerate(["x" * size for size in (3_000_000, 1_000_000, 1_000_000, 5_000_000)])
        await asyncio.gather(*(ask(scores, member, text=text) for member, text in texts))

    assert sorted(rewards.calls) == [[0, 1], [2], [3]]
