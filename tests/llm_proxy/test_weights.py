"""Weight updates through a real llm_proxy: begin, commit, abort, catching up, and every way that they go wrong."""

import asyncio
from typing import Any

import pytest

from rollfarm.errors import DeadlineExceeded, VersionOutOfOrder, WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from tests.llm_proxy.support import Proxy, asked, assert_exact, run_proxy, versions

BEHIND = llm_proxy_pb2.Engine.STATE_BEHIND
SERVING = llm_proxy_pb2.Engine.STATE_SERVING


def states(listed: Any) -> list[int]:
    return [engine.state for engine in listed.engines]


async def stage(proxy: Proxy, version: int, count: int = 1) -> list[str]:
    listed = await proxy.engines_when(lambda listed: sum(bool(one.instance_id) for one in listed.engines) == count)
    return await proxy.begin(version, *listed.engines)


async def test_a_request_goes_on_under_new_weights_and_the_boundary_is_exact() -> None:
    engine = SimulatedEngine(token_limit=3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=8)))
        await engine.until(lambda: engine.is_stalled)

        assert await stage(proxy, 1) == [""]
        assert (await proxy.list_engines()).policy_version == 0
        committed = await proxy.commit(1)
        engine.allow(None)

        result = await generating
        assert list(committed.engine_ids) == [address]
        assert versions(result) == [0] * 3 + [1] * 5
        assert_exact(result)
        assert engine.applied_modes == [engine_pb2.UPDATE_MODE_KEEP]
        status = await proxy.status()
        assert (status.policy_version, status.gate_closed) == (1, False)


async def test_in_resume_mode_requests_are_given_back_and_continue_from_their_tokens() -> None:
    engine = SimulatedEngine(token_limit=3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=8)))
        await proxy.until(lambda: proxy.fleet.router.generated_count == 3)
        await stage(proxy, 1)
        engine.token_limit = None

        await proxy.commit(1, mode=engine_pb2.UPDATE_MODE_RESUME)

        result = await generating
        assert versions(result) == [0] * 3 + [1] * 5
        assert_exact(result)
        assert result.resumption_count == 1


async def test_in_drain_mode_running_requests_finish_first_and_waiting_ones_come_after() -> None:
    engine = SimulatedEngine(slots=1, token_limit=3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        first = asyncio.create_task(proxy.generate(asked("first", max_tokens=4)))
        await engine.until(lambda: engine.is_stalled)
        second = asyncio.create_task(proxy.generate(asked("second", max_tokens=4)))
        await stage(proxy, 1)

        committing = asyncio.create_task(proxy.commit(1, mode=engine_pb2.UPDATE_MODE_DRAIN))
        await proxy.until(lambda: proxy.fleet.router.gate_closed)
        engine.allow(None)
        await committing

        assert versions(await first) == [0] * 4
        assert versions(await second) == [1] * 4


async def test_a_drain_that_takes_too_long_leaves_the_old_weights_serving() -> None:
    engine = SimulatedEngine(token_limit=3)
    async with engine.serve() as address, run_proxy(address, drain_timeout_seconds=0.5) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a")))
        await engine.until(lambda: engine.is_stalled)
        await stage(proxy, 1)

        with pytest.raises(DeadlineExceeded, match="1 requests still run"):
            await proxy.commit(1, mode=engine_pb2.UPDATE_MODE_DRAIN)
        engine.allow(None)

        assert versions(await generating) == [0] * 4
        assert not (await proxy.status()).gate_closed
        await proxy.commit(1)
        assert engine.version == 1


async def test_a_request_with_min_version_waits_for_the_commit() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy(address) as proxy:
        waiting = asyncio.create_task(proxy.generate(asked("a", min_version=1)))
        await stage(proxy, 1)
        assert versions(await proxy.generate(asked("b"))) == [0] * 4

        await proxy.commit(1)

        assert versions(await waiting) == [1] * 4


async def test_a_commit_of_what_is_served_answers_at_once_and_one_of_nothing_is_refused() -> None:
    engine = SimulatedEngine(version=2)
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()

        assert list((await proxy.commit(2)).engine_ids) == [address]
        with pytest.raises(WeightsNotStaged, match="version 3"):
            await proxy.commit(3)
        with pytest.raises(VersionOutOfOrder, match="older than 2"):
            await proxy.commit(1)
        with pytest.raises(VersionOutOfOrder, match="older than 2"):
            await stage(proxy, 1)


async def test_an_aborted_version_is_forgotten_and_the_old_one_serves() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy(address) as proxy:
        await stage(proxy, 1)

        await proxy.abort(1)

        assert engine.staged is None
        with pytest.raises(WeightsNotStaged):
            await proxy.commit(1)
        assert versions(await proxy.generate(asked("a"))) == [0] * 4


async def test_what_a_dead_trainer_staged_is_not_applied_with_its_successor_s_weights() -> None:
    first, second = SimulatedEngine(), SimulatedEngine()
    async with first.serve() as served, second.serve() as left, run_proxy(served, left) as proxy:
        await stage(proxy, 1, count=2)

        listed = await proxy.list_engines()
        await proxy.begin(1, *(engine for engine in listed.engines if engine.engine_id == served))
        committed = await proxy.commit(1)

        assert list(committed.engine_ids) == [served]
        assert (first.version, second.version) == (1, 0)


async def test_what_one_sender_brings_to_one_engine_leaves_what_it_staged_on_another() -> None:
    first, second = SimulatedEngine(), SimulatedEngine()
    async with first.serve() as one, second.serve() as two, run_proxy(one, two) as proxy:
        listed = await proxy.serving(2)
        for engine in listed.engines:
            await proxy.begin(1, engine, sender_id="trainer")
        assert sorted((await proxy.commit(1)).engine_ids) == sorted([one, two])

        await proxy.begin(2, listed.engines[0], sender_id="trainer")
        await proxy.begin(2, listed.engines[1], sender_id="its successor")
        assert list((await proxy.commit(2)).engine_ids) == [listed.engines[1].engine_id]


async def test_what_is_meant_for_an_instance_that_is_gone_leaves_what_its_successor_staged() -> None:
    async with run_proxy() as proxy:
        async with SimulatedEngine().serve() as address:
            await proxy.attach(address)
            gone = (await proxy.serving()).engines[0]
        async with SimulatedEngine().serve(int(address.rpartition(":")[2])):
            listed = await proxy.engines_when(lambda listed: listed.engines[0].instance_id != gone.instance_id)
            assert await proxy.begin(1, *listed.engines, sender_id="trainer") == [""]
            assert await proxy.begin(1, gone, sender_id="trainer") == ["ENGINE_FAILED"]

            assert list((await proxy.commit(1)).engine_ids) == [address]


async def test_an_engine_that_cannot_stage_does_not_hold_up_the_others_and_is_behind_afterwards() -> None:
    good, bad = SimulatedEngine(), SimulatedEngine(stage_error=WeightsMismatch("lm_head has 3 rows."))
    async with good.serve() as first, bad.serve() as second, run_proxy(first, second) as proxy:
        assert await stage(proxy, 1, count=2) == ["", "WEIGHTS_MISMATCH"]

        assert list((await proxy.commit(1)).engine_ids) == [first]

        listed = await proxy.list_engines()
        assert states(listed) == [SERVING, BEHIND]
        assert listed.engines[1].detail == "serves version 0, waits for 1"
        assert (await proxy.generate(asked("a"))).engine_id == first


async def test_an_engine_that_joins_late_is_behind_until_it_is_updated_and_the_others_go_on() -> None:
    early, late = SimulatedEngine(version=4, token_limit=2), SimulatedEngine()
    async with early.serve() as first, late.serve() as second, run_proxy(first) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=6)))
        await early.until(lambda: early.is_stalled)
        await proxy.attach(second)
        listed = await proxy.engines_when(lambda listed: BEHIND in states(listed))
        assert listed.policy_version == 4

        assert await proxy.begin(4, listed.engines[1]) == [""]
        assert sorted((await proxy.commit(4)).engine_ids) == sorted([first, second])
        early.allow(None)

        assert late.version == 4
        assert states(await proxy.list_engines()) == [SERVING, SERVING]
        assert versions(await generating) == [4] * 6


async def test_catching_up_does_not_close_the_gate_for_the_others() -> None:
    early, late = SimulatedEngine(version=4), SimulatedEngine(apply_seconds=3600)
    async with early.serve() as first, late.serve() as second, run_proxy(first, second) as proxy:
        listed = await proxy.engines_when(lambda listed: sorted(states(listed)) == [BEHIND, SERVING])
        await proxy.begin(4, listed.engines[1])
        committing = asyncio.create_task(proxy.commit(4))
        await late.until(lambda: late.is_applying)

        assert_exact(await proxy.generate(asked("a")))

        committing.cancel()


async def test_the_next_version_does_not_wait_for_one_that_catches_up() -> None:
    early, late = SimulatedEngine(version=4), SimulatedEngine(apply_seconds=3600)
    async with early.serve() as first, late.serve() as second, run_proxy(first, second) as proxy:
        listed = await proxy.engines_when(lambda listed: sorted(states(listed)) == [BEHIND, SERVING])
        await proxy.begin(4, listed.engines[1], sender_id="trainer")
        committing = asyncio.create_task(proxy.commit(4))
        await late.until(lambda: late.is_applying)

        await proxy.begin(5, listed.engines[0], sender_id="trainer")
        assert list((await proxy.commit(5)).engine_ids) == [first]

        committing.cancel()


async def test_weights_for_another_instance_or_an_unknown_engine_are_not_begun() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy(address) as proxy:
        listed = await proxy.serving()
        stale = llm_proxy_pb2.Engine(engine_id=address, instance_id="before the crash")
        unknown = llm_proxy_pb2.Engine(engine_id="nobody", instance_id="x")

        reasons = await proxy.begin(1, stale, listed.engines[0], unknown)

        assert reasons == ["ENGINE_FAILED", "", "UNKNOWN_ENGINE"]


async def test_an_engine_that_dies_while_it_receives_is_one_failure() -> None:
    healthy, dying = SimulatedEngine(), SimulatedEngine(stage_seconds=3600)
    async with healthy.serve() as first, run_proxy(first) as proxy:
        async with dying.serve() as second:
            await proxy.attach(second)
            beginning = asyncio.create_task(stage(proxy, 1, count=2))
            await dying.until(lambda: dying.is_staging)

        reasons = await beginning

        assert reasons[0] == ""
        assert reasons[1] in ("ENGINE_FAILED", "UNAVAILABLE", "CANCELLED")
        assert list((await proxy.commit(1)).engine_ids) == [first]


async def test_an_engine_that_fails_to_apply_serves_again_once_it_is_updated() -> None:
    good, bad = SimulatedEngine(), SimulatedEngine(apply_error=WeightsFailed("Out of memory."))
    async with good.serve() as first, bad.serve() as second, run_proxy(first, second) as proxy:
        await stage(proxy, 1, count=2)

        assert list((await proxy.commit(1)).engine_ids) == [first]
        listed = await proxy.engines_when(lambda listed: states(listed) == [SERVING, BEHIND])
        bad.apply_error = None
        await proxy.begin(1, listed.engines[1])
        await proxy.commit(1)

        assert states(await proxy.list_engines()) == [SERVING, SERVING]


async def test_when_no_engine_applies_the_old_weights_keep_serving() -> None:
    engine = SimulatedEngine(apply_error=WeightsFailed("Out of memory."))
    async with engine.serve() as address, run_proxy(address) as proxy:
        await stage(proxy, 1)

        with pytest.raises(WeightsNotStaged, match="None of 1 engines"):
            await proxy.commit(1)

        assert versions(await proxy.generate(asked("a"))) == [0] * 4
        assert (await proxy.status()).policy_version == 0


async def test_a_restarted_engine_has_lost_what_it_staged() -> None:
    async with run_proxy() as proxy:
        async with SimulatedEngine().serve() as address:
            await proxy.attach(address)
            await stage(proxy, 1)
        async with SimulatedEngine().serve(int(address.rpartition(":")[2])):
            await proxy.serving()

            with pytest.raises(WeightsNotStaged):
                await proxy.commit(1)


async def test_an_engine_that_restarts_while_another_still_applies_is_not_taken_for_one_that_did() -> None:
    quick, slow = SimulatedEngine(), SimulatedEngine(apply_seconds=3600)
    async with run_proxy() as proxy, slow.serve() as second:
        async with quick.serve() as first:
            await proxy.attach(first)
            await proxy.attach(second)
            await stage(proxy, 1, count=2)
            committing = asyncio.create_task(proxy.commit(1))
            await quick.until(lambda: quick.version == 1)
            await slow.until(lambda: slow.is_applying)
        restarted = SimulatedEngine()
        async with restarted.serve(int(first.rpartition(":")[2])):
            await proxy.engines_when(lambda listed: listed.engines[0].instance_id == restarted.instance_id)
            proxy.fleet.detach(second)

            with pytest.raises(WeightsNotStaged, match="None of 2 engines"):
                await committing

            (engine,) = (await proxy.list_engines()).engines
            assert (engine.state, engine.policy_version) == (SERVING, 0)
            assert versions(await proxy.generate(asked("a"))) == [0] * 4


async def test_a_commit_is_carried_out_even_when_the_trainer_dies_meanwhile() -> None:
    engine = SimulatedEngine(apply_seconds=0.3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        await stage(proxy, 1)
        committing = asyncio.create_task(proxy.commit(1))
        await engine.until(lambda: engine.is_applying)

        committing.cancel()

        assert list((await proxy.commit(1)).engine_ids) == [address]
        assert engine.applied_modes == [engine_pb2.UPDATE_MODE_KEEP]
        assert not (await proxy.status()).gate_closed
