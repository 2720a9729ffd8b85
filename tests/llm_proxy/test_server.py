"""LlmProxyService over real sockets: what clients see."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from statistics import median
from typing import Any, cast

import pytest
from grpc import aio

from llm_proxy.config import LlmProxyConfig
from llm_proxy.engines import Fleet
from llm_proxy.server import LlmProxyServicer, Once
from rollfarm import rpc
from rollfarm.errors import (
    DeadlineExceeded,
    InvalidArgument,
    QuotaExceeded,
    UnknownEngine,
    VersionNotServed,
    VersionUnavailable,
)
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2
from tests.llm_proxy.support import SECONDS, Proxy, asked, assert_exact, run_proxy

SERVING = llm_proxy_pb2.Engine.STATE_SERVING
CONNECTING = llm_proxy_pb2.Engine.STATE_CONNECTING
DRAINING = llm_proxy_pb2.Engine.STATE_DRAINING


async def read(call: Any, count: int) -> dict[str, Any]:
    """The next `count` results of a GenerateMany stream, by request."""
    results: dict[str, Any] = {}
    async with asyncio.timeout(SECONDS):
        while len(results) < count:
            results.update({result.request_id: result for result in (await call.read()).results})
    return results


async def test_a_generation_is_answered_with_its_tokens_versions_and_engine() -> None:
    engine = SimulatedEngine(version=3)
    async with engine.serve() as address, run_proxy(address) as proxy:
        result = await proxy.generate(asked("a", max_tokens=5))

        assert_exact(result)
        assert [(span.policy_version, span.token_count) for span in result.version_spans] == [(3, 5)]
        assert result.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert (result.engine_id, result.resumption_count) == (address, 0)
        status = await proxy.status()
        assert (status.policy_version, status.generated_token_count, status.finished_count) == (3, 5, 1)


async def test_many_generations_share_a_stream_and_the_engine_is_never_given_more_than_its_slots() -> None:
    engine = SimulatedEngine(slots=7)
    async with engine.serve() as address, run_proxy(address) as proxy:
        call = proxy.stub.GenerateMany(timeout=SECONDS)
        generations = [asked(str(number), max_tokens=1 + number % 3) for number in range(100)]
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))
        await call.done_writing()

        results = await read(call, 100)

        for result in results.values():
            assert_exact(result)
        assert engine.most_running == 7
        assert await call.read() is aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_refused_request_is_one_item_of_a_batch() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()
        call = proxy.stub.GenerateMany(timeout=SECONDS)
        generations = [asked("bad", max_tokens=0), asked("good")]
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))

        results = await read(call, 2)

        assert results["bad"].failure.reason == "INVALID_ARGUMENT"
        assert_exact(results["good"])
        call.cancel()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 64}, "64 tokens"),
        ({"prompt": [1, 256]}, "Token id 256"),
        ({"prompt": [-1]}, "Token id -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_version": 2, "exact_version": 1}, "less than min_version"),
        ({"request_id": ""}, "request_id is empty"),
    ],
)
async def test_what_no_engine_could_generate_is_refused(wrong: Any, message: str) -> None:
    engine = SimulatedEngine(context_tokens=64)
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()

        with pytest.raises(InvalidArgument, match=message):
            await proxy.generate(asked(**({"request_id": "a"} | wrong)))

        assert engine.most_running == 0


async def test_half_a_token_is_refused() -> None:
    async with run_proxy() as proxy:
        generation = asked("a")
        generation.generation.prompt_token_ids = b"\x01\x02\x03"

        with pytest.raises(InvalidArgument, match="not a multiple of 4"):
            await proxy.generate(generation)


async def test_a_version_that_is_gone_is_refused_and_names_the_served_one() -> None:
    engine = SimulatedEngine(version=4)
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()

        with pytest.raises(VersionUnavailable) as refused:
            await proxy.generate(asked("a", exact_version=3))

        assert refused.value.facts["policy_version"] == "4"


async def test_without_engines_requests_wait_for_one_to_be_attached() -> None:
    engine = SimulatedEngine()
    async with run_proxy() as proxy, engine.serve() as address:
        with pytest.raises(DeadlineExceeded):
            await proxy.generate(asked("too late"), timeout=0.2)
        generating = asyncio.create_task(proxy.generate(asked("a")))
        await proxy.until(lambda: proxy.fleet.router.waiting_count == 1)

        await proxy.attach(address)

        assert_exact(await generating)
        assert (await proxy.status()).finished_count == 1


async def test_cancelling_a_call_frees_its_slot() -> None:
    engine = SimulatedEngine(slots=1, token_limit=1)
    async with engine.serve() as address, run_proxy(address) as proxy:
        first = asyncio.create_task(proxy.generate(asked("first", max_tokens=9)))
        await engine.until(lambda: engine.is_stalled)
        second = asyncio.create_task(proxy.generate(asked("second", max_tokens=1)))

        first.cancel()

        assert_exact(await second)
        assert (await proxy.status()).running_count == 0


async def test_the_end_of_a_stream_cancels_its_open_requests() -> None:
    engine = SimulatedEngine(slots=1, token_limit=1)
    async with engine.serve() as address, run_proxy(address) as proxy:
        call = proxy.stub.GenerateMany()
        generations = [asked(str(number), max_tokens=9) for number in range(50)]
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))
        await engine.until(lambda: engine.is_stalled)

        call.cancel()

        await engine.until(lambda: not engine.open_requests)
        await proxy.until(lambda: not proxy.fleet.router.waiting_count and not proxy.fleet.router.running_count)


async def test_a_cancelled_request_of_a_stream_answers_with_the_tokens_that_it_has() -> None:
    engine = SimulatedEngine(token_limit=2)
    async with engine.serve() as address, run_proxy(address) as proxy:
        call = proxy.stub.GenerateMany()
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=[asked("a", max_tokens=9)]))
        await proxy.until(lambda: proxy.fleet.router.generated_count == 2)

        cancel = llm_proxy_pb2.CancelRequest(request_ids=["a", "unknown"])
        await rpc.call(proxy.stub.Cancel, cancel, timeout=SECONDS)

        result = (await read(call, 1))["a"]
        assert_exact(result)
        assert result.finish_reason == trajectory_pb2.FINISH_REASON_ABORT
        await engine.until(lambda: not engine.open_requests)
        call.cancel()


async def test_a_cancelled_request_frees_its_slot_within_100_ms() -> None:
    engine = SimulatedEngine(slots=1, token_limit=1)
    async with engine.serve() as address, run_proxy(address) as proxy:
        call = proxy.stub.GenerateMany()
        names = [str(number) for number in range(6)]
        generations = [asked(name, max_tokens=9) for name in names]
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))
        seconds: list[float] = []
        for running, after in pairwise(names):
            await engine.until(lambda running=running: engine.open_requests == [running] and engine.is_stalled)
            began = time.monotonic()
            await rpc.call(proxy.stub.Cancel, llm_proxy_pb2.CancelRequest(request_ids=[running]), timeout=SECONDS)
            await engine.until(lambda after=after: engine.open_requests == [after])
            seconds.append(time.monotonic() - began)

        # The median: on a busy machine one of them may have to wait for the processor.
        assert median(seconds) < 0.1
        call.cancel()


async def test_a_version_that_does_not_come_is_refused_in_time_although_nothing_happens() -> None:
    engine = SimulatedEngine(version=4)
    async with engine.serve() as address, run_proxy(address, version_wait_seconds=0.3, health_seconds=3600) as proxy:
        await proxy.serving()

        request = llm_proxy_pb2.GenerateRequest(generation=asked("a", min_version=9))
        with pytest.raises(VersionNotServed, match="Version 9 did not come in time; 4 is served") as refused:
            await rpc.call(proxy.stub.Generate, request, timeout=SECONDS, retry=False)

        assert refused.value.facts["policy_version"] == "4"


async def test_a_tenant_beyond_its_quota_is_refused_and_the_others_are_served() -> None:
    engine = SimulatedEngine(token_limit=0)
    tenants = {"a": {"most_open": 2, "most_running": 1}}
    async with engine.serve() as address, run_proxy(address, tenants=tenants) as proxy:
        await proxy.serving()
        calls = [asyncio.create_task(proxy.generate(asked(name, tenant="a"))) for name in ("one", "two")]
        await proxy.until(lambda: len(proxy.fleet.router.tenants) == 1 and proxy.fleet.router.waiting_count == 1)

        with pytest.raises(QuotaExceeded):
            await proxy.generate(asked("three", tenant="a"))
        calls.append(asyncio.create_task(proxy.generate(asked("another's", tenant="b"))))
        await engine.until(lambda: len(engine.open_requests) == 2)

        tenants_now = {one.tenant: (one.queued_count, one.running_count) for one in (await proxy.status()).tenants}
        assert tenants_now == {"a": (1, 1), "b": (0, 1)}
        engine.allow(None)
        for result in await asyncio.gather(*calls):
            assert_exact(result)
        assert not (await proxy.status()).tenants


async def test_a_draining_engine_finishes_what_it_has_and_leaves() -> None:
    leaving, staying = SimulatedEngine(token_limit=1), SimulatedEngine()
    async with leaving.serve() as first, staying.serve() as second, run_proxy(first) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=5)))
        await leaving.until(lambda: leaving.is_stalled)

        await detach(proxy, first, drain=True)

        await proxy.attach(second)
        await proxy.serving()
        assert (await proxy.generate(asked("b"))).engine_id == second
        assert [engine.state for engine in (await proxy.list_engines()).engines] == [DRAINING, SERVING]
        leaving.allow(None)
        result = await generating
        assert (result.engine_id, result.resumption_count) == (first, 0)
        listed = await proxy.engines_when(lambda listed: len(listed.engines) == 1)
        assert listed.engines[0].engine_id == second


async def test_an_engine_that_is_attached_again_while_it_drains_stays() -> None:
    engine = SimulatedEngine(token_limit=1)
    async with engine.serve() as address, run_proxy(address) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a")))
        await engine.until(lambda: engine.is_stalled)
        await detach(proxy, address, drain=True)
        await proxy.engines_when(lambda listed: listed.engines[0].state == DRAINING)

        await proxy.attach(address)
        engine.allow(None)

        assert_exact(await generating)
        assert_exact(await proxy.generate(asked("b")))


class Talkative(SimulatedEngine):
    """Reports what only a real inference server knows."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        status = await super().GetStatus(request, context)
        status.kv_cache_usage, status.server_version = 0.25, "0.32.0"
        return status


async def test_engines_are_shown_as_they_report_themselves() -> None:
    engine = Talkative(slots=1, token_limit=3)
    async with engine.serve() as address, run_proxy(address, oversubscription=2, health_seconds=0.05) as proxy:
        calls = [asyncio.create_task(proxy.generate(asked(name))) for name in "ab"]

        await proxy.until(lambda: proxy.fleet.router.engine(address).status.waiting_count == 1)
        await proxy.until(lambda: proxy.fleet.router.engine(address).tokens_per_second > 0)

        (shown,) = (await proxy.status()).engines
        assert (shown.server_version, shown.kv_cache_usage) == ("0.32.0", 0.25)
        assert (shown.slot_count, shown.running_count, shown.decoding_count, shown.waiting_count) == (1, 2, 1, 1)
        assert shown.tokens_per_second > 0
        engine.allow(None)
        await asyncio.gather(*calls)


async def test_a_name_is_an_address() -> None:
    engine = SimulatedEngine()
    async with engine.serve() as address, run_proxy() as proxy:
        await proxy.attach(f"localhost:{address.rpartition(':')[2]}")

        assert_exact(await proxy.generate(asked("a")))


async def test_a_retry_of_an_open_request_joins_it() -> None:
    engine = SimulatedEngine(token_limit=1)
    async with engine.serve() as address, run_proxy(address) as proxy:
        calls = [asyncio.create_task(proxy.generate(asked("a"))) for _ in range(2)]
        await engine.until(lambda: engine.is_stalled)
        engine.allow(None)

        first, second = await asyncio.gather(*calls)

        assert first.token_ids == second.token_ids
        assert engine.generated_count == 4


async def test_list_engines_is_a_long_poll_that_answers_every_change() -> None:
    engine = SimulatedEngine()
    async with run_proxy() as proxy:
        async with engine.serve() as address:
            empty = await proxy.list_engines()
            waiting = asyncio.create_task(proxy.list_engines(after_revision=empty.revision))
            await proxy.attach(address)
            assert [one.address for one in (await waiting).engines] == [address]

            listed = await proxy.serving()
            assert listed.engines[0].instance_id == engine.instance_id
            assert (listed.engines[0].slot_count, listed.engines[0].adapter) == (8, "simulated")

        lost = await proxy.engines_when(lambda listed: listed.engines[0].state == CONNECTING)
        assert lost.engines[0].detail

        with pytest.raises(UnknownEngine):
            await detach(proxy, "nobody")
        await detach(proxy, address)
        assert not (await proxy.list_engines()).engines


async def detach(proxy: Proxy, engine_id: str, *, drain: bool = False) -> None:
    request = llm_proxy_pb2.DetachEngineRequest(engine_id=engine_id, drain=drain)
    await rpc.call(proxy.stub.DetachEngine, request, timeout=SECONDS)


async def test_a_detached_engine_s_requests_continue_elsewhere() -> None:
    leaving, staying = SimulatedEngine(token_limit=1), SimulatedEngine()
    async with leaving.serve() as first, staying.serve() as second, run_proxy(first) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=5)))
        await proxy.until(lambda: proxy.fleet.router.generated_count == 1)

        await detach(proxy, first)
        await proxy.attach(second)

        assert_exact(await generating)
        await leaving.until(lambda: not leaving.open_requests)


async def test_an_engine_that_comes_back_on_its_port_serves_again() -> None:
    engine = SimulatedEngine()
    async with run_proxy() as proxy:
        async with engine.serve() as address:
            await proxy.attach(address)
            await proxy.serving()
        await proxy.engines_when(lambda listed: listed.engines[0].state == CONNECTING)
        restarted = SimulatedEngine()
        async with restarted.serve(int(address.rpartition(":")[2])):
            listed = await proxy.serving()

            assert listed.engines[0].instance_id == restarted.instance_id
            assert_exact(await proxy.generate(asked("a")))


async def test_an_attached_engine_outlives_the_deadline_of_the_call_that_attached_it() -> None:
    async with SimulatedEngine().serve() as address, run_proxy() as proxy:
        await rpc.call(proxy.stub.AttachEngine, llm_proxy_pb2.AttachEngineRequest(address=address), timeout=0.3)
        serving = await proxy.serving()

        much_later = llm_proxy_pb2.ListEnginesRequest(after_revision=serving.revision)
        listed = await rpc.call(proxy.stub.ListEngines, much_later, timeout=1)

        assert listed == serving


async def test_a_generation_takes_its_trace_to_the_engine() -> None:
    engine = SimulatedEngine(token_limit=0)
    async with engine.serve() as address, run_proxy(address) as proxy:
        call = proxy.stub.GenerateMany(timeout=SECONDS)
        generations = [asked(name, trace_id=name * 32) for name in "ab"]
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))

        await engine.until(lambda: engine.traces == {"a": "a" * 32, "b": "b" * 32})

        call.cancel()


async def test_a_request_that_was_not_sent_yet_is_cancelled_without_the_engine() -> None:
    engine = SimulatedEngine(token_limit=0)
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()
        router, waiter = proxy.fleet.router, Once()
        for name in "abcd":
            router.submit(asked(name), waiter, time.monotonic())
        proxy.fleet.wake()
        await engine.until(lambda: len(engine.open_requests) == 4)
        router.submit(asked("late"), waiter, time.monotonic())
        proxy.fleet.wake()
        await asyncio.sleep(0)

        router.cancel("late", time.monotonic())
        proxy.fleet.wake()
        await asyncio.sleep(0)

        assert router.unconfirmed_cancels(address) == []
        assert len(router.engine(address).attempts) == 4


async def test_an_address_without_a_port_is_refused() -> None:
    async with run_proxy() as proxy:
        with pytest.raises(InvalidArgument, match="not host:port"):
            await proxy.attach("engine-0")


async def test_a_stream_that_begins_after_the_stop_is_not_read() -> None:
    async def requests() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    stop, context = asyncio.Event(), cast(Any, None)
    stop.set()
    servicer = LlmProxyServicer(Fleet(LlmProxyConfig(engines=[])), stop)

    async with asyncio.timeout(SECONDS):
        assert [response async for response in servicer.GenerateMany(requests(), context)] == []
