"""LlmProxyService over real sockets: engines that die, hang, stall or answer nonsense, and a bug of its own."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from grpc import aio

from llm_proxy import engines
from llm_proxy.breakers import Phase
from llm_proxy.config import LlmProxyConfig
from llm_proxy.engines import Fleet
from llm_proxy.server import Stream
from rollfarm import tokens
from rollfarm.errors import InvalidArgument
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2
from tests.llm_proxy.support import asked, assert_exact, run_proxy, versions
from tests.llm_proxy.world import Client

SERVING = llm_proxy_pb2.Engine.STATE_SERVING
SUSPENDED = llm_proxy_pb2.Engine.STATE_SUSPENDED


async def test_a_killed_engine_s_requests_continue_elsewhere_with_exactly_the_right_tokens() -> None:
    dying, surviving = SimulatedEngine(token_limit=3), SimulatedEngine()
    async with surviving.serve() as second, run_proxy() as proxy:
        async with dying.serve() as first:
            await proxy.attach(first)
            generating = [asyncio.create_task(proxy.generate(asked(name, max_tokens=10))) for name in "abc"]
            await dying.until(lambda: dying.is_stalled and len(dying.open_requests) == 3)
            await proxy.until(lambda: proxy.fleet.router.generated_count == 9)
        await proxy.attach(second)

        for result in await asyncio.gather(*generating):
            assert_exact(result)
            assert tokens.token_count(result.token_ids) == 10
            assert (result.engine_id, result.resumption_count) == (second, 1)
        assert surviving.generated_count == 21
        assert (await proxy.status()).resumption_count == 3


async def test_an_engine_that_hangs_is_given_up() -> None:
    hanging, healthy = SimulatedEngine(token_limit=2), SimulatedEngine()
    async with (
        hanging.serve() as first,
        healthy.serve() as second,
        run_proxy(first, health_timeout_seconds=0.3) as proxy,
    ):
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=6)))
        await proxy.until(lambda: proxy.fleet.router.generated_count == 2)

        hanging.is_hung = True
        await proxy.attach(second)

        result = await generating
        assert_exact(result)
        assert result.engine_id == second


async def test_an_engine_that_stalls_is_suspended_and_its_requests_continue_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalling, healthy = SimulatedEngine(token_limit=2), SimulatedEngine()
    async with (
        stalling.serve() as first,
        healthy.serve() as second,
        run_proxy(first, stall_seconds=0.5, suspend_seconds=0.1) as proxy,
    ):
        logs = structlog.testing.LogCapture()
        monkeypatch.setattr(engines, "log", structlog.wrap_logger(None, processors=[logs]))
        generating = asyncio.create_task(proxy.generate(asked("a", max_tokens=6)))
        await stalling.until(lambda: stalling.is_stalled)
        await proxy.attach(second)

        result = await generating
        assert_exact(result)
        assert (result.engine_id, versions(result)) == (second, [0] * 6)
        await stalling.until(lambda: not stalling.open_requests)
        listed = await proxy.list_engines()
        assert [engine.state for engine in listed.engines] == [SUSPENDED, SERVING]
        assert listed.engines[0].detail.startswith("no token for 0.5 s; tried after")

        stalling.allow(None)
        await proxy.until(lambda: proxy.fleet.router.engine(first).breaker.phase is Phase.READY)
        assert (await proxy.generate(asked("probe"))).engine_id == first
        assert [engine.state for engine in (await proxy.list_engines()).engines] == [SERVING, SERVING]
        said = [(entry["event"], entry["engine_id"]) for entry in logs.entries if entry["event"] != "engine reached"]
        assert said == [("engine suspended", first), ("engine serves again", first)]


class Unstamped(SimulatedEngine):
    """Sends a token without a version."""

    def _admit(self, running: Any) -> None:
        chunk = engine_pb2.GenerationChunk(
            request_id=running.generation.request_id,
            token_ids=tokens.pack_ids([1]),
            logprobs=tokens.pack_logprobs([0.0]),
        )
        running.outbox.put_nowait(chunk)


async def test_an_engine_that_breaks_its_contract_is_left() -> None:
    broken, sound = Unstamped(), SimulatedEngine()
    async with broken.serve() as first, sound.serve() as second, run_proxy(first) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a")))
        await proxy.engines_when(lambda listed: "versions for" in listed.engines[0].detail)

        await proxy.attach(second)

        assert_exact(await generating)


class Garbled(SimulatedEngine):
    """Answers its stream with bytes that are no message."""

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        async def generate(requests: Any, context: Any) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield b"\xff\xff\xff"

        parse, status = (
            engine_pb2.EngineServiceGetStatusRequest.FromString,
            engine_pb2.EngineServiceGetStatusResponse.SerializeToString,
        )
        handlers = {
            "Generate": grpc.stream_stream_rpc_method_handler(generate),
            "GetStatus": grpc.unary_unary_rpc_method_handler(self.GetStatus, parse, status),
        }
        server = aio.server()
        service = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield f"127.0.0.1:{bound}"
        finally:
            await server.stop(grace=None)


async def test_an_engine_whose_bytes_are_no_message_is_left() -> None:
    broken, sound = Garbled(), SimulatedEngine()
    async with broken.serve() as first, sound.serve() as second, run_proxy(first) as proxy:
        generating = asyncio.create_task(proxy.generate(asked("a")))
        await proxy.engines_when(lambda listed: "no valid message" in listed.engines[0].detail)

        await proxy.attach(second)

        assert_exact(await generating)


@pytest.mark.parametrize("carry_out", [Fleet.wake, Fleet.flush])
async def test_a_bug_in_what_a_loop_turn_does_ends_the_service(carry_out: Callable[[Fleet], None]) -> None:
    class Broken:
        def answer(self, request: Any) -> None:
            raise RuntimeError("planted")

    fleet = Fleet(LlmProxyConfig(engines=[]))
    running = asyncio.create_task(fleet.run())
    await asyncio.sleep(0)
    fleet.router.submit(asked("a"), Broken(), 0.0)
    fleet.router.cancel("a", 0.0)
    carry_out(fleet)

    with pytest.raises(BaseExceptionGroup) as ended:
        await running

    assert ended.group_contains(RuntimeError, match="planted")


async def test_what_is_flushed_is_answered_at_once() -> None:
    fleet, client = Fleet(LlmProxyConfig(engines=[])), Client()
    fleet.router.submit(asked("a"), client, 0.0)
    fleet.router.cancel("a", 0.0)

    fleet.flush()

    assert client.results["a"].finish_reason == trajectory_pb2.FINISH_REASON_ABORT


async def test_a_request_that_is_cancelled_and_sent_again_in_one_turn_is_waited_for() -> None:
    fleet, stream = Fleet(LlmProxyConfig(engines=[])), Stream()
    stream.open.add(fleet.router.submit(asked("a"), stream, 0.0))
    fleet.router.cancel("a", 0.0)
    again = fleet.router.submit(asked("a"), stream, 0.0)
    stream.open.add(again)

    fleet.flush()

    assert stream.open == {again}


async def test_a_timer_that_is_early_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda delay, *act: call_later(max(0.0, delay - 0.02), *act))
    async with run_proxy(version_wait_seconds=0.1) as proxy:
        request = llm_proxy_pb2.GenerateRequest(generation=asked("a", min_version=1))
        with pytest.raises(aio.AioRpcError) as refused:
            await proxy.stub.Generate(request, timeout=5)

    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_refused_call_is_not_kept_by_a_cycle() -> None:
    async with run_proxy() as proxy:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(20):
                with pytest.raises(InvalidArgument):
                    await proxy.generate(asked(f"r{number}", max_tokens=0))
            gc.collect()
            kept = [found for found in gc.garbage if isinstance(found, llm_proxy_pb2.GenerateRequest)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

        assert not kept
