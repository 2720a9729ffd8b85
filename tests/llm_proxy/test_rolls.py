"""Weight updates that roll over the engines: some change while the others go on serving the old version."""

import asyncio
from typing import Any

import pytest

from rollfarm.errors import WeightsFailed, WeightsNotStaged
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from tests.llm_proxy.support import Proxy, asked, assert_exact, run_proxy, versions
from tests.llm_proxy.world import World

BEHIND = llm_proxy_pb2.Engine.STATE_BEHIND
SERVING = llm_proxy_pb2.Engine.STATE_SERVING
DRAIN = engine_pb2.UPDATE_MODE_DRAIN


def states(listed: Any) -> list[int]:
    return [engine.state for engine in listed.engines]


async def stage(proxy: Proxy, version: int, count: int) -> None:
    listed = await proxy.serving(count)
    assert await proxy.begin(version, *listed.engines) == [""] * count


async def busy(proxy: Proxy, engine: SimulatedEngine, name: str, **more: Any) -> "asyncio.Task[Any]":
    """A request that runs on this engine, the one with a free slot, and waits there for `allow`."""
    generating = asyncio.create_task(proxy.generate(asked(name, **more)))
    await engine.until(lambda: name in engine.open_requests)
    return generating


# --- routing ---


def test_in_a_roll_both_versions_are_served_and_demands_are_heeded() -> None:
    world = World()
    for name in ("new", "old"):
        world.engine(name, version=1, slots=8)
    world.ask("waits for 2", min_version=2)
    world.ask("exactly 1, early", exact_version=1)
    world.router.begin_roll()
    world.step()

    world.router.served({"new": "new"}, 2, world.now)
    for name, demand in {"any": {}, "at least 1": {"min_version": 1}, "exactly 2": {"exact_version": 2}}.items():
        world.ask(name, **demand)
    world.ask("exactly 1", exact_version=1)
    world.ask("waits for 3", min_version=3)

    sent = dict(each.split("@") for each in world.step())
    assert (sent["waits for 2"], sent["exactly 2"], sent["exactly 1"]) == ("new", "new", "old")
    assert {"any", "at least 1"} < set(sent)
    assert "waits for 3" not in sent
    assert world.router.policy_version == 2
    assert [engine.state for engine in world.router.engines] == [SERVING, SERVING]


def test_when_the_roll_ends_engines_that_did_not_change_are_behind() -> None:
    world = World()
    for name in ("new", "failed"):
        world.engine(name, version=1)
    world.router.begin_roll()
    world.router.served({"new": "new"}, 2, world.now)
    world.router.hold("failed")
    world.ask("exactly 1", exact_version=1)
    assert world.step() == []

    world.router.release("failed", world.now)
    world.router.end_roll(world.now)
    world.step()

    assert [engine.state for engine in world.router.engines] == [SERVING, BEHIND]
    assert world.client.results["exactly 1"].failure.reason == "VERSION_UNAVAILABLE"


def test_an_engine_that_joins_in_a_roll_serves_the_old_version_until_the_roll_ends() -> None:
    world = World()
    world.engine("one", version=1)
    world.router.begin_roll()
    world.router.served({"one": "one"}, 2, world.now)

    world.engine("late", version=1)
    world.engine("far behind", version=0)
    assert [engine.state for engine in world.router.engines] == [SERVING, SERVING, BEHIND]
    world.router.end_roll(world.now)

    assert [engine.state for engine in world.router.engines] == [SERVING, BEHIND, BEHIND]


def test_a_request_with_tokens_of_the_new_version_does_not_go_back_to_the_old_one() -> None:
    world = World()
    world.engine("new", version=1)
    world.engine("old", version=1)
    world.router.begin_roll()
    world.router.served({"new": "new"}, 2, world.now)
    world.ask("a", min_version=2)
    world.step()
    world.tell("new", "a", [5], version=2)

    world.router.lost("new", "killed", world.now)
    assert world.step() == []
    world.engine("new", version=2, instance="again")

    assert world.sent[-1][0] == "new"


def test_an_engine_that_takes_weights_gets_nothing() -> None:
    world = World()
    world.engine("e")
    world.router.hold("e")
    world.ask("a")
    assert world.step() == []

    world.router.release("e", world.now)

    assert world.step() == ["a@e"]


# --- over sockets ---


async def test_a_roll_changes_one_engine_after_the_other_and_the_gate_stays_open() -> None:
    engines = [SimulatedEngine(apply_seconds=0.1) for _ in range(3)]
    first, second, third = engines
    async with (
        first.serve() as a,
        second.serve() as b,
        third.serve() as c,
        run_proxy(a, b, c) as proxy,
    ):
        await stage(proxy, 1, 3)
        most_at_once = 0

        def watch() -> bool:
            nonlocal most_at_once
            most_at_once = max(most_at_once, sum(engine.is_applying for engine in engines))
            assert not proxy.fleet.router.gate_closed
            return False

        watching = [asyncio.create_task(engine.until(watch)) for engine in engines]
        committed = await proxy.commit(1, concurrent_engine_count=1)

        assert most_at_once == 1
        assert sorted(committed.engine_ids) == sorted([a, b, c])
        assert [engine.version for engine in engines] == [1, 1, 1]
        assert states(await proxy.list_engines()) == [SERVING] * 3
        for task in watching:
            task.cancel()


async def test_while_an_engine_applies_the_others_answer_with_the_old_version() -> None:
    slow, other = SimulatedEngine(apply_seconds=3600), SimulatedEngine(token_limit=1)
    async with slow.serve() as a, other.serve() as b, run_proxy(b) as proxy:
        await proxy.serving()
        running = await busy(proxy, other, "makes it change last")
        await proxy.attach(a)
        await stage(proxy, 1, 2)
        committing = asyncio.create_task(proxy.commit(1, concurrent_engine_count=1))
        await slow.until(lambda: slow.is_applying)
        other.allow(None)

        results = await asyncio.gather(*(proxy.generate(asked(str(number))) for number in range(5)))

        for result in results:
            assert result.engine_id == b
            assert versions(result) == [0] * 4
        assert versions(await running) == [0] * 4
        committing.cancel()


async def test_a_draining_engine_gets_nothing_new_and_demands_find_their_versions_meanwhile() -> None:
    engines = [SimulatedEngine(slots=4) for _ in range(3)]
    idle, short, long = engines
    async with idle.serve() as a, short.serve() as b, long.serve() as c, run_proxy() as proxy:
        for count, (engine, address) in enumerate([(long, c), (short, b)], start=1):
            engine.token_limit = 1
            await proxy.attach(address)
            await proxy.serving(count)
            await busy(proxy, engine, f"on {address}", max_tokens=60 - 20 * count)
        await proxy.attach(a)
        await stage(proxy, 1, 3)
        committing = asyncio.create_task(proxy.commit(1, concurrent_engine_count=1, mode=DRAIN))
        await idle.until(lambda: idle.version == 1)
        await proxy.until(lambda: proxy.fleet.router.engine(b).is_held)
        long.allow(None)

        new = await proxy.generate(asked("new", min_version=1))
        old = await proxy.generate(asked("old", exact_version=0))

        assert (new.engine_id, versions(new)) == (a, [1] * 4)
        assert (old.engine_id, versions(old)) == (c, [0] * 4)
        assert short.open_requests == [f"on {b}"]
        short.allow(None)
        assert sorted((await committing).engine_ids) == sorted([a, b, c])


async def test_in_a_roll_each_engine_has_the_time_to_drain() -> None:
    slow, busied = SimulatedEngine(apply_seconds=1.5), SimulatedEngine(token_limit=1)
    async with slow.serve() as a, busied.serve() as b, run_proxy(b, drain_timeout_seconds=1) as proxy:
        await proxy.serving()
        running = await busy(proxy, busied, "makes it change last")
        await proxy.attach(a)
        await stage(proxy, 1, 2)
        committing = asyncio.create_task(proxy.commit(1, concurrent_engine_count=1, mode=DRAIN))
        await proxy.until(lambda: proxy.fleet.router.engine(b).is_held)
        busied.allow(None)

        assert set((await committing).engine_ids) == {a, b}
        assert versions(await running) == [0] * 4


async def test_an_engine_that_dies_in_a_roll_does_not_stop_it_and_is_brought_up_to_date_later() -> None:
    healthy, dying = SimulatedEngine(), SimulatedEngine(apply_seconds=3600)
    async with healthy.serve() as first, run_proxy(first) as proxy:
        async with dying.serve() as second:
            await proxy.attach(second)
            await stage(proxy, 1, 2)
            committing = asyncio.create_task(proxy.commit(1, concurrent_engine_count=2))
            await dying.until(lambda: dying.is_applying)

        assert list((await committing).engine_ids) == [first]

        restarted = SimulatedEngine()
        async with restarted.serve(int(second.rpartition(":")[2])):
            listed = await proxy.engines_when(lambda listed: states(listed) == [SERVING, BEHIND])
            await proxy.begin(1, listed.engines[1])
            await proxy.commit(1, concurrent_engine_count=1)

            assert states(await proxy.list_engines()) == [SERVING, SERVING]
            assert restarted.version == 1


async def test_a_roll_goes_on_to_its_end_when_the_trainer_dies() -> None:
    engines = [SimulatedEngine(apply_seconds=0.2) for _ in range(2)]
    async with engines[0].serve() as a, engines[1].serve() as b, run_proxy(a, b) as proxy:
        await stage(proxy, 1, 2)
        committing = asyncio.create_task(proxy.commit(1, concurrent_engine_count=1))
        await proxy.until(lambda: any(engine.is_held for engine in proxy.fleet.router.engines))

        committing.cancel()

        await proxy.engines_when(lambda listed: {engine.policy_version for engine in listed.engines} == {1})
        assert states(await proxy.list_engines()) == [SERVING, SERVING]
        assert_exact(await proxy.generate(asked("a", exact_version=1)))


async def test_an_engine_that_fails_in_a_roll_is_behind_when_it_ends() -> None:
    good, bad = SimulatedEngine(), SimulatedEngine(apply_error=WeightsFailed("Out of memory."))
    async with good.serve() as first, bad.serve() as second, run_proxy(first, second) as proxy:
        await stage(proxy, 1, 2)

        assert list((await proxy.commit(1, concurrent_engine_count=1)).engine_ids) == [first]

        assert states(await proxy.list_engines()) == [SERVING, BEHIND]


async def test_a_roll_in_which_no_engine_changes_leaves_the_old_version_serving() -> None:
    engine = SimulatedEngine(apply_error=WeightsFailed("Out of memory."))
    async with engine.serve() as address, run_proxy(address) as proxy:
        await stage(proxy, 1, 1)

        with pytest.raises(WeightsNotStaged, match="None of 1 engines"):
            await proxy.commit(1, concurrent_engine_count=1)

        assert versions(await proxy.generate(asked("a"))) == [0] * 4


async def test_a_new_version_is_staged_after_the_roll_that_is_under_way() -> None:
    engines = [SimulatedEngine(apply_seconds=0.2) for _ in range(2)]
    async with engines[0].serve() as one, engines[1].serve() as two, run_proxy(one, two) as proxy:
        await stage(proxy, 1, 2)
        committing = asyncio.create_task(proxy.commit(1, concurrent_engine_count=1))
        await proxy.until(lambda: any(engine.is_applying for engine in engines))

        await stage(proxy, 2, 2)

        assert set((await committing).engine_ids) == {one, two}
        assert set((await proxy.commit(2)).engine_ids) == {one, two}
