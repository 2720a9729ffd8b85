"""Rewards that compare the members of a group, over real sockets."""

import asyncio
from typing import Any

import pytest

from rollfarm.errors import FarmError, RewardFailed
from rollfarm.reward import Episode
from rollfarm.reward_server import RewardServicer
from tests.reward_gateway import rewards_of_ones_own as own
from tests.reward_gateway.support import OWN, Asked, config, episode, scoring, serving

TOGETHER = {"name": f"{OWN}:together"}


async def send(score: Asked, *answers: str, size: int = 0, first: int = 0, group: str = "g") -> list[Any]:
    """What each member is answered, or the error."""
    calls = [
        score(episode(answer), group_id=group, member=member, group_size=size or len(answers))
        for member, answer in enumerate(answers, first)
    ]
    return await asyncio.gather(*calls, return_exceptions=True)


async def members_are_here(score: Asked, gateway_count: int) -> None:
    await score.until(lambda domain: domain.rewards[0].scored_count >= gateway_count)


async def test_members_are_compared_when_all_are_here_and_each_gets_its_own_verdict():
    rewards = [{"name": f"{OWN}:shorter", "weight": 2.0, "settings": {"bonus": 0.5}}, {"name": "environment"}]
    async with scoring(config(*rewards)) as score:
        answers = await send(score, "four", "fi", "s")

    assert [answer.reward for answer in answers] == [1.0, 5.0, 7.0]
    assert [part.name for part in answers[0].parts] == [f"{OWN}:shorter", "environment"]


async def test_built_in_rewards_compare_too():
    async with scoring(config({"name": "relative_length"}, {"name": "rank", "weight": 10.0})) as score:
        calls = [
            score(episode("x" * length, steps=(paid,)), group_id="g", member=member, group_size=2)
            for member, (length, paid) in enumerate([(10, 0.0), (20, 1.0)])
        ]
        answers = await asyncio.gather(*calls)

    assert [answer.reward for answer in answers] == [0.5, 9.5]


async def test_a_member_whose_caller_went_away_is_still_compared():
    async with scoring(config({"name": "environment"}, TOGETHER)) as score:
        gone = asyncio.create_task(score(episode("a"), group_id="g", member=0, group_size=2))
        await members_are_here(score, 1)
        gone.cancel()
        (answer,) = await send(score, "b", size=2, first=1)

    assert answer.parts[1].detail == "a,b"


async def test_a_caller_that_goes_away_during_the_comparison_does_not_take_its_siblings_with_it():
    own.GATE["together"] = asyncio.Event()
    async with scoring(config({"name": "environment"}, TOGETHER)) as score:
        first = asyncio.create_task(score(episode("a"), group_id="g", member=0, group_size=2))
        await members_are_here(score, 1)
        last = asyncio.create_task(score(episode("gate"), group_id="g", member=1, group_size=2))
        await members_are_here(score, 2)
        last.cancel()
        own.GATE["together"].set()
        answer = await first

    assert answer.parts[1].detail == "a,gate"


async def test_a_late_redundant_member_is_compared_with_the_first_ones():
    async with scoring(config(TOGETHER)) as score:
        await send(score, "a", "b")
        late = await send(score, "c", "d", size=2, first=2)

    assert [answer.parts[0].detail for answer in late] == ["a,b,c", "a,b,d"]


async def test_a_member_that_is_sent_again_replaces_itself():
    async with scoring(config(TOGETHER)) as score:
        first, again, other = await asyncio.gather(
            score(episode("a"), group_id="g", member=0, group_size=2),
            score(episode("a"), group_id="g", member=0, group_size=2),
            score(episode("b"), group_id="g", member=1, group_size=2),
        )
        (played_again,) = await send(score, "c", size=2, first=1)

    assert [answer.parts[0].detail for answer in (first, again, other)] == ["a,b"] * 3
    assert played_again.parts[0].detail == "a,c"


async def test_a_comparison_that_fails_fails_every_member_and_the_next_may_succeed():
    async with scoring(config(TOGETHER)) as score:
        failed = await send(score, "a", "raise")
        again = await send(score, "b", size=2, first=1)
        status = (await score.status()).domains[0].rewards[0]

    assert all(isinstance(error, RewardFailed) for error in failed)
    assert "raised ValueError: one of them says raise" in str(failed[0])
    assert again[0].parts[0].detail == "a,b"
    assert (status.failed_count, status.scored_count) == (2, 2)


async def test_a_group_that_never_completes_ends_with_its_callers_deadline_and_says_who_is_missing():
    async with scoring(config(TOGETHER)) as score:
        with pytest.raises(RewardFailed, match="2 of its 3 members are here"):
            await asyncio.gather(
                *(score(episode("a"), group_id="g", member=m, group_size=3, timeout=2.5) for m in range(2))
            )


async def test_a_group_whose_room_is_needed_is_forgotten_with_its_cause():
    async with scoring(config({"name": "environment"}, TOGETHER, gather_megabytes=1)) as score:
        waiting = asyncio.create_task(score(episode("a" * 600_000), group_id="g", member=0, group_size=2))
        await members_are_here(score, 1)
        other = asyncio.create_task(score(episode("b" * 600_000), group_id="h", member=0, group_size=2))
        with pytest.raises(RewardFailed, match="others needed its room"):
            await waiting
        assert not other.done()
        other.cancel()


@pytest.mark.parametrize("group", [{}, {"group_id": "g"}, {"group_id": "g", "group_size": 1}, {"group_size": 4}])
async def test_an_episode_without_siblings_is_a_failure(group):
    async with scoring(config(TOGETHER)) as score:
        with pytest.raises(RewardFailed, match=r"this episode has no siblings .*, as in validation"):
            await score(episode("a"), **group)


@pytest.mark.parametrize(
    ("reward", "cause"), [("too_few", "1 verdicts for 2 episodes"), ("not_many", "returned float, not one verdict for")]
)
async def test_verdicts_that_do_not_match_the_members_are_a_failure(reward, cause):
    async with scoring(config({"name": f"{OWN}:{reward}"})) as score:
        answers = await send(score, "a", "b")

    assert all(isinstance(answer, RewardFailed) and cause in answer.problem for answer in answers)


async def test_an_external_scorer_compares_by_score_group():
    async with serving(RewardServicer(own.shorter).register) as address:
        external = {"mine": {"address": address, "compares": True}}
        async with scoring(config({"name": "mine"}, external=external)) as score:
            answers = await send(score, "four", "fi")

    assert [answer.reward for answer in answers] == [0.0, 2.0]


def alone(episode: Episode) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "compares", "cause"),
    [(alone, True, "says that it compares"), (own.shorter, False, "lacks compares")],
)
async def test_an_external_scorer_and_its_table_have_to_agree(function, compares, cause):
    async with serving(RewardServicer(function).register) as address:
        external = {"mine": {"address": address, "compares": compares}}
        async with scoring(config({"name": "mine"}, external=external)) as score:
            answers = await send(score, "a", "b")

    assert all(isinstance(answer, FarmError) and cause in answer.problem for answer in answers)
