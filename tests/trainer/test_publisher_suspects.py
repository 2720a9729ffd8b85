"""Engines that fail to take versions or are slow to, behind a real llm_proxy: they hold up one publication, and come
back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from rollfarm.errors import WeightsFailed
from rollfarm.service import Changed
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import llm_proxy_pb2
from tests.llm_proxy.support import Proxy, asked, run_proxy, transfers_to, versions
from trainer.weights.publisher import Publisher
from trainer.weights.shared import staged_by
from trainer.weights.snapshot import Snapshot, take_snapshot
from trainer.weights.transport import Begin


class Names:
    """A Transport of nothing: simulated engines need no bytes."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, set[str]]] = []
        """Versions, and whom they went to."""

        self.known: set[str] = set()
        """Instances that something may be kept for."""

        self.changed = Changed()

    async def transfer(self, snapshot: Snapshot, engines: Sequence[llm_proxy_pb2.Engine], begin: Begin) -> list[str]:
        self.sent.append((snapshot.policy_version, {engine.engine_id for engine in engines}))
        self.changed.notify()
        request = llm_proxy_pb2.BeginWeightUpdateRequest(
            policy_version=snapshot.policy_version, transfers=transfers_to(engines)
        )
        return staged_by(await begin(request))

    def forget_all_but(self, instance_ids: Collection[str]) -> None:
        self.known = set(instance_ids)
        self.changed.notify()


async def at_once() -> None:
    """Announces without delay."""


class Farm:
    """A publisher, and whom its versions went to."""

    def __init__(self, proxy: Proxy, *, seconds: float, mode: str = "keep", concurrent_engine_count: int = 0) -> None:
        self.names = Names()
        self.publisher = Publisher(
            proxy.stub,
            self.names,
            mode=mode,
            transfer_timeout_seconds=seconds,
            concurrent_engine_count=concurrent_engine_count,
        )

    async def publish(self, version: int, announce: Callable[[], Awaitable[None]] = at_once) -> None:
        tensors = [("w", torch.zeros(1))]
        taken = take_snapshot(tensors, policy_version=version, dtype=torch.float32, bucket_size_bytes=64)
        async with asyncio.timeout(15):
            await self.publisher.publish(taken, announce)

    async def publish_until_both(self, version: int) -> None:
        """Publish this version and later ones until one goes to two engines at once, as soon as nobody is suspected."""
        async with asyncio.timeout(15):
            while len(self.names.sent[-1][1]) < 2:
                await self.publish(version)
                version += 1

    async def until_sent_again(self, engine_id: str) -> None:
        """Until a version went to the engine alone, since now."""
        before = len(self.names.sent)
        assert await self.names.changed.first(
            lambda: any(ids == {engine_id} for _, ids in self.names.sent[before:]) or None, 15
        )

    async def until_sent(self, version: int, engine_id: str) -> None:
        assert await self.names.changed.first(lambda: (version, {engine_id}) in self.names.sent or None, 15)


@asynccontextmanager
async def farm_of(
    *engines: SimulatedEngine, seconds: float, drain_timeout_seconds: float = 60.0, **publishing: Any
) -> AsyncIterator[tuple[Farm, Proxy, list[str]]]:
    """The publisher, which keeps engines up to date meanwhile, llm_proxy, and the engines' ids."""
    first, second = engines
    async with (
        first.serve() as one,
        second.serve() as two,
        run_proxy(one, two, drain_timeout_seconds=drain_timeout_seconds) as proxy,
    ):
        await proxy.serving(2)
        farm = Farm(proxy, seconds=seconds, **publishing)
        watching = asyncio.create_task(farm.publisher.watch())
        try:
            yield farm, proxy, [one, two]
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def test_one_that_hangs_while_it_receives_slows_one_publication_and_is_tried_beside_the_others() -> None:
    good, bad = SimulatedEngine(), SimulatedEngine(stage_seconds=3600)
    async with farm_of(good, bad, seconds=3) as (farm, proxy, (one, two)):
        await farm.publish(1)
        for version in (2, 3):
            await farm.until_sent(version - 1, two)
            await farm.publish(version)
            assert (version, {one}) in farm.names.sent
        assert (good.version, bad.version) == (3, 0)

        bad.stage_seconds = 0
        await proxy.engines_when(lambda listed: {each.policy_version for each in listed.engines} == {3})
        await farm.publish_until_both(4)

        assert good.version == bad.version >= 4


async def test_one_that_takes_versions_and_does_not_apply_them_is_left_out_until_it_does() -> None:
    good, bad = SimulatedEngine(), SimulatedEngine(apply_error=WeightsFailed("Out of memory."))
    async with farm_of(good, bad, seconds=10) as (farm, proxy, (one, _)):
        await farm.publish(1)
        await farm.publish(2)
        assert (2, {one}) in farm.names.sent

        bad.apply_error = None
        await proxy.engines_when(lambda listed: {each.policy_version for each in listed.engines} == {2})
        await farm.publish_until_both(3)

        assert good.version == bad.version >= 3


async def test_one_that_hangs_does_not_hold_up_another_suspect() -> None:
    hung, failing = (SimulatedEngine(stage_error=WeightsFailed("Out of memory.")) for _ in range(2))
    async with farm_of(hung, failing, seconds=60) as (farm, _, (_, other)):
        await farm.publish(1)
        hung.stage_seconds, hung.stage_error = 3600, None
        await hung.until(lambda: hung.is_staging)

        await farm.until_sent_again(other)
        failing.stage_error = None
        await failing.until(lambda: failing.version == 1)

        assert hung.is_staging


async def test_one_that_applies_versions_more_slowly_than_they_are_published_is_trusted_again() -> None:
    good, slow = SimulatedEngine(), SimulatedEngine(stage_error=WeightsFailed("Out of memory."))
    async with farm_of(good, slow, seconds=10) as (farm, _, both):
        await farm.publish(1)
        slow.stage_error, slow.apply_seconds = None, 0.5
        await slow.until(lambda: slow.is_applying)
        await farm.publish(2)
        await slow.until(lambda: slow.version == 1 and slow.is_applying)

        await farm.publish(3)

        assert farm.names.sent[-1] == (3, set(both))
        assert good.version == slow.version == 3


async def test_nobody_is_brought_up_to_date_before_the_next_version_where_the_trainer_wants_that() -> None:
    good, bad, late = SimulatedEngine(), SimulatedEngine(stage_error=WeightsFailed("Out of memory.")), SimulatedEngine()
    async with farm_of(good, bad, seconds=10) as (farm, proxy, (one, _)), late.serve() as third:
        await farm.publish(1)
        bad.stage_error, bad.stage_seconds = None, 0.3
        await bad.until(lambda: bad.is_staging)
        farm.publisher.may_catch_up.clear()
        before = len(farm.names.sent)
        await proxy.attach(third)
        await asyncio.wait({asyncio.create_task(bad.until(lambda: bad.version > 0))}, timeout=1)
        assert (bad.staged, bad.version, len(farm.names.sent)) == (1, 0, before)

        await farm.publish(2)

        assert (2, {one, third}) in farm.names.sent
        await proxy.engines_when(lambda listed: {each.policy_version for each in listed.engines} == {2})


async def test_one_that_fails_before_the_first_version_is_announced_is_tried_once_it_is() -> None:
    good, bad = SimulatedEngine(), SimulatedEngine(stage_error=WeightsFailed("Out of memory."))
    async with farm_of(good, bad, seconds=10) as (farm, proxy, _):
        list_engines = proxy.stub.ListEngines

        async def announce() -> None:
            """Until suspects were looked at twice."""
            looks = asyncio.Semaphore(0)

            def look(request: llm_proxy_pb2.ListEnginesRequest, **call: Any) -> Any:
                if not request.HasField("after_revision"):
                    looks.release()
                return list_engines(request, **call)

            proxy.stub.ListEngines = look
            async with asyncio.timeout(15):
                await looks.acquire()
                await looks.acquire()

        await farm.publish(1, announce)
        bad.stage_error = None

        await bad.until(lambda: bad.version == 1)


async def test_engines_that_change_one_after_the_other_have_the_time_of_each() -> None:
    engines = [SimulatedEngine(apply_seconds=0.9) for _ in range(2)]
    async with farm_of(*engines, seconds=1.5, concurrent_engine_count=1) as (farm, _, both):
        await farm.publish(1)
        await farm.publish(2)

        assert farm.names.sent == [(1, set(both)), (2, set(both))]
        assert [engine.version for engine in engines] == [2, 2]


async def test_those_that_apply_a_version_later_than_they_should_are_not_sent_it_again() -> None:
    engines = [SimulatedEngine(apply_seconds=1.0) for _ in range(2)]
    async with farm_of(*engines, seconds=0.7) as (farm, proxy, both):
        await farm.publish(1)
        farm.publisher.may_catch_up.clear()
        await proxy.engines_when(lambda listed: {each.policy_version for each in listed.engines} == {1})
        for engine in engines:
            engine.apply_seconds = 0

        await farm.publish(2)
        await proxy.engines_when(lambda listed: {each.policy_version for each in listed.engines} == {2})

        assert farm.names.sent == [(1, set(both)), (2, set(both))]


async def test_requests_that_drain_may_take_longer_than_a_transfer() -> None:
    one, other = (SimulatedEngine(token_limit=3) for _ in range(2))
    async with farm_of(one, other, seconds=0.5, mode="drain") as (farm, proxy, both):
        running = asyncio.create_task(proxy.generate(asked("a")))
        await proxy.until(lambda: one.is_stalled or other.is_stalled)
        publishing = asyncio.create_task(farm.publish(1))
        await asyncio.wait({publishing}, timeout=1)
        assert not publishing.done()

        one.allow(None)
        other.allow(None)
        await publishing

        assert versions(await running) == [0] * 4
        assert (one.version, other.version, farm.names.sent) == (1, 1, [(1, set(both))])


async def test_what_was_not_applied_because_requests_ran_on_is_not_sent_again() -> None:
    one, other = (SimulatedEngine(token_limit=3) for _ in range(2))
    async with farm_of(one, other, seconds=10, mode="drain", drain_timeout_seconds=0.2) as (farm, proxy, both):
        running = asyncio.create_task(proxy.generate(asked("a")))
        await proxy.until(lambda: one.is_stalled or other.is_stalled)
        await farm.publish(1)
        assert (one.version, other.version) == (0, 0)

        one.allow(None)
        other.allow(None)
        await proxy.engines_when(lambda listed: {each.policy_version for each in listed.engines} == {1})

        assert versions(await running) == [0] * 4
        assert farm.names.sent == [(1, set(both))]


async def test_where_llm_proxy_lists_an_engine_no_more_nothing_is_kept_for_it() -> None:
    stays, leaves = SimulatedEngine(), SimulatedEngine()
    async with farm_of(stays, leaves, seconds=10) as (farm, proxy, (_, two)):
        await farm.publish(1)
        assert farm.names.known == {stays.instance_id, leaves.instance_id}

        proxy.fleet.detach(two)

        assert await farm.names.changed.first(lambda: farm.names.known == {stays.instance_id} or None, 15)
