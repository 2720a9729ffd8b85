"""Domains do not hold each other up; failures that may pass are tried again; what was scored is remembered."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from reward_gateway.config import RewardGatewayConfig
from reward_gateway.metrics import DomainsCollector
from reward_gateway.pool import WorkerPool
from reward_gateway.timeouts import Timeout
from reward_gateway.wiring import open_gateway
from rollfarm.errors import RewardFailed
from rollfarm.reward import Episode, TryAgain, may_pass
from rollfarm.reward_server import RewardServicer
from rollfarm.v1 import reward_gateway_pb2, trajectory_pb2
from tests.reward_gateway import rewards_of_ones_own as own
from tests.reward_gateway.support import OWN, config, episode, scoring, serving


def two_domains(slow: dict[str, object], **more: object) -> RewardGatewayConfig:
    quick = {"rewards": [{"name": "exact"}]}
    return RewardGatewayConfig.model_validate({"domains": {"slow": slow, "quick": quick}, **more})


def gated(*answers: str) -> dict[str, object]:
    for answer in answers:
        own.GATE[answer] = asyncio.Event()
    return {"rewards": [{"name": f"{OWN}:gated"}], "concurrency": 2}


async def test_a_slow_domain_takes_only_its_own_places_and_gives_them_in_order():
    async with scoring(two_domains(gated("a", "b", "c", "d"))) as score:
        slow = []
        for count, answer in enumerate("abcd", 1):
            slow.append(asyncio.create_task(score(episode(answer, domain="slow"))))
            await score.until(lambda domain, count=count: domain.running_count + domain.waiting_count == count)
        full = (await score.status()).domains[0]
        quick = await score(episode("x", reference="x", domain="quick"))
        own.GATE["d"].set()
        own.GATE["c"].set()
        own.GATE["a"].set()
        await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(slow[0], slow[2], slow[3])
        still = slow[1].done()
        own.GATE["b"].set()
        await slow[1]
        empty = (await score.status()).domains[0]

    assert (full.running_count, full.waiting_count) == (2, 2)
    assert quick.reward == 1.0
    assert not still
    assert (empty.running_count, empty.waiting_count) == (0, 0)


async def test_the_wait_for_a_place_is_bounded_in_time_and_in_number():
    async with scoring(two_domains(gated("a", "b"), wait_seconds=0.3, waiting=1)) as score:
        running = [asyncio.create_task(score(episode(answer, domain="slow"))) for answer in "ab"]
        await score.until(lambda domain: domain.running_count == 2)
        waiting = asyncio.create_task(score(episode("c", domain="slow")))
        await score.until(lambda domain: domain.waiting_count == 1)
        with pytest.raises(RewardFailed, match="2 episodes of this domain are being scored and 1 wait"):
            await score(episode("d", domain="slow"))
        with pytest.raises(RewardFailed, match=r"Domain slow had no place in 0\.3 s"):
            await waiting
        for event in own.GATE.values():
            event.set()
        await asyncio.gather(*running)


async def test_a_caller_that_gives_up_leaves_its_place_in_the_queue():
    async with scoring(two_domains(gated("a", "b", "c", "d"))) as score:
        running = [asyncio.create_task(score(episode(answer, domain="slow"))) for answer in "ab"]
        await score.until(lambda domain: domain.running_count == 2)
        given_up = asyncio.create_task(score(episode("c", domain="slow")))
        await score.until(lambda domain: domain.waiting_count == 1)
        given_up.cancel()
        await score.until(lambda domain: domain.waiting_count == 0)
        for event in own.GATE.values():
            event.set()
        await asyncio.gather(*running, score(episode("d", domain="slow")))


async def test_a_failure_that_may_pass_is_tried_again_and_a_score_counts_once():
    own.ATTEMPTS.clear()
    async with scoring(config({"name": f"{OWN}:moody", "settings": {"failures": 2}}, retries=2)) as score:
        response = await score(episode("m"))
        status = (await score.status()).domains[0].rewards[0]

    assert (response.reward, own.ATTEMPTS["m"]) == (1.0, 3)
    assert (status.scored_count, status.failed_count) == (1, 0)


async def test_a_failure_that_does_not_pass_fails_after_the_retries():
    own.ATTEMPTS.clear()
    async with scoring(config({"name": f"{OWN}:moody", "settings": {"failures": 9}}, retries=1)) as score:
        with pytest.raises(RewardFailed, match=f"Reward {OWN}:moody: not in the mood"):
            await score(episode("m"))
        status = (await score.status()).domains[0].rewards[0]

    assert own.ATTEMPTS["m"] == 2
    assert (status.scored_count, status.failed_count) == (0, 1)
    assert status.detail == f"Reward {OWN}:moody: not in the mood"


async def test_an_external_scorer_tells_that_a_failure_may_pass():
    asked = []

    def moody(episode: Episode) -> float:
        asked.append(episode.answer)
        raise TryAgain("later")

    async with serving(RewardServicer(moody).register) as address:
        external = {"mine": {"address": address}}
        async with scoring(config({"name": "mine"}, external=external, retries=2)) as score:
            with pytest.raises(RewardFailed, match="Reward mine: later"):
                await score(episode("m"))

    assert asked == ["m"] * 3


async def test_a_score_is_remembered_by_content_where_the_reward_says_that_it_may():
    own.ATTEMPTS.clear()
    async with scoring(config({"name": f"{OWN}:counted"}, {"name": f"{OWN}:patient"})) as score:
        rewards = [(await score(episode(answer))).reward for answer in ("a", "a", "b", "a")]
        counted, patient = (await score.status()).domains[0].rewards

    assert rewards == [2.0] * 4
    assert (counted.scored_count, counted.cached_count) == (2, 2)
    assert (patient.scored_count, patient.cached_count) == (4, 0)


async def test_a_memory_of_no_size_asks_every_time():
    own.ATTEMPTS.clear()
    async with scoring(config({"name": f"{OWN}:counted"}, cached_scores=0)) as score:
        rewards = [(await score(episode("a"))).reward for _ in range(2)]

    assert rewards == [1.0, 2.0]


async def test_a_reward_is_given_less_time_once_it_was_quick():
    async with scoring(config({"name": f"{OWN}:patient"}, {"name": f"{OWN}:patient", "timeout_seconds": 90})) as score:
        before = [reward.timeout_duration.seconds for reward in (await score.status()).domains[0].rewards]
        await score(episode("a"))
        after = [reward.timeout_duration.seconds for reward in (await score.status()).domains[0].rewards]

    assert (before, after) == ([30, 90], [2, 2])


async def test_the_metrics_are_those_of_the_status():
    own.ATTEMPTS.clear()
    async with open_gateway(config({"name": f"{OWN}:counted"}, {"name": "exact"})) as gateway:
        registry = CollectorRegistry()
        registry.register(DomainsCollector(gateway.domains.values()))
        for _ in range(2):
            with pytest.raises(RewardFailed):
                await gateway.domains["d"].score(reward_gateway_pb2.ScoreRequest(episode=episode("a")))
        text = generate_latest(registry).decode()

    for line in (
        f'scores_total{{domain="d",result="scored",reward="{OWN}:counted"}} 1.0',
        f'scores_total{{domain="d",result="cached",reward="{OWN}:counted"}} 1.0',
        'scores_total{domain="d",result="failed",reward="exact"} 2.0',
        'timeout_seconds{domain="d",reward="exact"} 30.0',
        'episodes{domain="d",state="running"} 0.0',
    ):
        assert f"rollfarm_reward_gateway_{line}" in text


async def test_the_status_says_what_programs_are_run_under():
    async with scoring(config({"name": "exact"})) as score:
        without = (await score.status()).sandbox_level
    async with scoring(config({"name": "code"})) as score:
        level = (await score.status()).sandbox_level

    assert without == trajectory_pb2.SANDBOX_LEVEL_UNSPECIFIED
    assert level != trajectory_pb2.SANDBOX_LEVEL_UNSPECIFIED


async def test_a_value_is_clipped_before_it_is_weighted():
    async with scoring(config({"name": "environment", "clip": [-1, 0.5], "weight": 2.0})) as score:
        rewards = [(await score(episode("a", steps=(paid,)))).reward for paid in (7.0, 0.25, -3.0)]

    assert rewards == [1.0, 0.5, -2.0]


def test_bounds_that_hold_nothing_are_refused():
    with pytest.raises(ValueError, match="low bound 1 is above its high bound 0"):
        config({"name": "exact", "clip": [1, 0]})


async def test_a_worker_that_runs_out_of_memory_or_may_do_better_later_says_so():
    timeout = Timeout(least=30, factor=1, most=30, window=1)
    async with WorkerPool(1, megabytes=2048) as pool:
        with pytest.raises(RewardFailed, match="eats_memory raised MemoryError") as for_good:
            await pool.score(f"{OWN}:eats_memory", {}, [episode("a")], timeout)
        with pytest.raises(RewardFailed, match="never in the mood") as passing:
            await pool.score(f"{OWN}:moody_worker", {}, [episode("a")], timeout)

    assert (may_pass(for_good.value), may_pass(passing.value)) == (False, True)


async def test_a_pattern_that_takes_for_ever_costs_its_own_score_alone():
    catastrophic = {"name": "regex", "settings": {"pattern": "(a+)+$"}}
    async with scoring(config(catastrophic, timeout_seconds=1.5)) as score:
        with pytest.raises(RewardFailed, match=re.escape("Reward regex gave no score in 1.5 s")):
            await score(episode("a" * 60 + "b"))
        fine = await score(episode("aaa"))

    assert fine.reward == 1.0


async def test_an_episode_of_a_megabyte_is_scored():
    text = "word " * 200_000
    instant = [{"name": name} for name in ("choice", "exact", "qa", "tags")]
    overlong = {"name": "overlong", "settings": {"most": 10, "buffer": 5}}
    reference = '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'
    async with scoring(config(*instant)) as score:
        quick = await score(episode(text, reference="B"))
    async with scoring(config({"name": "json_schema"}, {"name": "instructions"}, overlong)) as score:
        worked = await score(episode(text, reference=reference))

    assert quick.reward == 0.0
    assert [part.value for part in worked.parts] == [0.0, 1.0, -1.0]
