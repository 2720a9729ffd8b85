"""Engines that sleep for a trainer on their devices, through a real llm_proxy."""

import asyncio
from typing import Any

import pytest

from rollfarm import times
from rollfarm.errors import EngineFailed, Unsupported
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import engine_pb2
from tests.llm_proxy.support import Proxy, asked, assert_exact, run_proxy, versions


async def test_running_requests_are_given_back_and_go_on_from_their_tokens_once_the_engines_are_awake() -> None:
    engine = SimulatedEngine(token_limit=3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        running = asyncio.create_task(proxy.generate(asked("running", max_tokens=8)))
        await proxy.until(lambda: proxy.fleet.router.generated_count == 3)
        engine.token_limit = None

        assert await proxy.sleep() == [address]
        waiting = asyncio.create_task(proxy.generate(asked("waiting")))
        await proxy.until(lambda: proxy.fleet.router.waiting_count == 2)
        asleep = (await proxy.list_engines()).engines[0]
        assert (asleep.sleeping, asleep.running_count, engine.open_requests) == (True, 0, [])

        assert await proxy.wake() == [address]
        for result in (await running, await waiting):
            assert_exact(result)
        assert (await running).resumption_count == 1
        assert not (await proxy.list_engines()).engines[0].sleeping


async def test_requests_that_may_drain_finish_first() -> None:
    engine = SimulatedEngine(token_limit=3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        running = asyncio.create_task(proxy.generate(asked("a", max_tokens=8)))
        await engine.until(lambda: engine.is_stalled)

        sleeping = asyncio.create_task(proxy.sleep(drain_duration=times.duration(60)))
        await proxy.until(lambda: proxy.fleet.router.engine(address).is_held)
        assert not engine.is_asleep
        engine.allow(None)

        assert await sleeping == [address]
        assert (await running).resumption_count == 0


async def test_a_version_comes_while_they_sleep_and_without_weights_nothing_is_generated_before() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()
        await proxy.sleep(discard_weights=True)
        waiting = asyncio.create_task(proxy.generate(asked("a")))
        assert await proxy.wake() == []
        await proxy.sleep(discard_weights=True)

        assert await proxy.begin(1, *(await proxy.list_engines()).engines) == [""]
        await proxy.commit(1)
        assert engine.is_asleep
        assert not waiting.done()
        assert await proxy.wake() == [address]

        assert versions(await waiting) == [1] * 4


async def test_when_nobody_renews_the_sleep_the_engines_wake() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()
        await proxy.sleep(lease_seconds=1.0)
        woken = asyncio.create_task(engine.until(lambda: not engine.is_asleep))
        for _ in range(3):
            await asyncio.sleep(0.5)
            await proxy.sleep(lease_seconds=1.0)
        assert not woken.done()

        await woken
        assert_exact(await proxy.generate(asked("a")))


def asleep(proxy: Proxy) -> list[str]:
    """The instances that llm_proxy knows to be asleep."""
    engines = proxy.fleet.router.engines
    return [engine.status.instance_id for engine in engines if engine.is_reached and engine.status.sleeping]


async def test_an_engine_that_joins_or_restarts_sleeps_with_the_others() -> None:
    first, second = SimulatedEngine(), SimulatedEngine()
    async with run_proxy() as proxy:
        assert await proxy.sleep() == []
        async with first.serve() as address:
            await proxy.attach(address)
            await first.until(lambda: first.is_asleep)
        async with second.serve(int(address.rpartition(":")[2])):
            await proxy.until(lambda: asleep(proxy) == [second.instance_id])

            assert await proxy.wake() == [address]
            assert not second.is_asleep


async def test_one_that_cannot_sleep_is_an_error_and_the_others_are_awake_afterwards() -> None:
    able, unable = SimulatedEngine(), SimulatedEngine(sleep_error=Unsupported("It was started without."))
    async with able.serve() as first, unable.serve() as second, run_proxy(first, second) as proxy:
        await proxy.serving(2)

        with pytest.raises(Unsupported, match="started without"):
            await proxy.sleep()

        assert not able.is_asleep
        assert sorted(await proxy.wake()) == sorted([first, second])


async def test_one_that_joins_and_cannot_sleep_wakes_nobody() -> None:
    able, unable = SimulatedEngine(), SimulatedEngine(sleep_error=Unsupported("It was started without."))
    async with able.serve() as first, unable.serve() as second, run_proxy(first) as proxy:
        await proxy.serving()
        await proxy.sleep()
        await proxy.attach(second)
        await proxy.serving(2)

        with pytest.raises(Unsupported, match="started without"):
            await proxy.sleep()

        assert able.is_asleep


async def test_one_that_fails_to_sleep_is_tried_again_and_holds_up_nobody() -> None:
    able, failing = SimulatedEngine(), SimulatedEngine(sleep_error=EngineFailed("Out of memory."))
    async with able.serve() as first, failing.serve() as second, run_proxy(first, second) as proxy:
        await proxy.serving(2)

        assert first in await proxy.sleep()

        failing.sleep_error = None
        await failing.until(lambda: failing.is_asleep)
        await proxy.wake()
        await failing.until(lambda: not failing.is_asleep)


async def test_one_that_fell_asleep_and_did_not_say_so_is_woken_once_it_is_reached() -> None:
    class Silent(SimulatedEngine):
        async def Sleep(self, request: engine_pb2.SleepRequest, context: Any) -> Any:
            await super().Sleep(request, context)
            raise EngineFailed("The answer is lost.")

    engine = Silent()
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()
        await proxy.sleep()
        await proxy.wake()

        await engine.until(lambda: not engine.is_asleep)


async def test_one_that_is_not_reached_yet_is_waited_for_until_it_cannot_be() -> None:
    class Slow(SimulatedEngine):
        async def GetStatus(self, request: engine_pb2.EngineServiceGetStatusRequest, context: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().GetStatus(request, context)

    slow, hung = Slow(), SimulatedEngine(is_hung=True)
    async with (
        slow.serve() as first,
        hung.serve() as second,
        run_proxy(first, second, health_timeout_seconds=1) as proxy,
    ):
        assert await proxy.sleep() == [first]


async def test_a_trainer_that_wakes_them_after_llm_proxy_restarted_finds_them_awake() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address:
        async with run_proxy(address) as proxy:
            await proxy.serving()
            await proxy.sleep()
        async with run_proxy(address) as proxy:
            await proxy.serving()
            assert engine.is_asleep

            assert await proxy.wake() == [address]
