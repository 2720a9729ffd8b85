"""Leases, and what happens to them when others restart or change their mind."""

import asyncio
from collections import defaultdict

import pytest
from grpc import aio

from env_manager.generator import Generator
from env_manager.rendering import Conversation, Renderer
from rollfarm import rpc, telemetry
from rollfarm.env import Environment, Observation, Step
from rollfarm.errors import InvalidArgument, JournalUnavailable
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, llm_proxy_pb2_grpc, trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeProxy, FakeRewards, episode, serving, tokenizer, working

TOKENIZER = tokenizer()
LAKE = '{"size": 3, "holes": 0}'


def left(prompt: object, asked: object) -> list[int]:
    return TOKENIZER.encode("left")


def silent(prompt: object, asked: object) -> None:
    return None


async def test_no_more_is_leased_than_there_are_free_slots():
    buffer, proxy = FakeBuffer(), FakeProxy(left)
    buffer.add(*[episode(settings=LAKE, member=member) for member in range(10)])
    async with serving(proxy.register) as address, working(buffer, address, slots=4, environments=["frozen_lake"]):
        await buffer.ended(10)

    assert buffer.asked[0].max_leases == 4
    assert all(1 <= asked.max_leases <= 4 for asked in buffer.asked)
    assert {asked.worker_id for asked in buffer.asked} == {"worker-1"}
    assert list(buffer.asked[0].environments) == ["frozen_lake"]
    assert len(buffer.completed) == 10


async def test_requests_of_parallel_episodes_travel_together():
    buffer, proxy = FakeBuffer(), FakeProxy(left)
    buffer.add(*[episode(settings=LAKE, member=member) for member in range(32)])
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.ended(32)

    assert max(proxy.message_sizes) == 32
    assert len(proxy.message_sizes) < len(proxy.requests) / 4


async def test_a_cancelled_lease_ends_its_episode_silently_and_frees_generation_and_slot():
    buffer, proxy = FakeBuffer(), FakeProxy(silent)
    buffer.add(episode(settings=LAKE))
    async with serving(proxy.register) as address, working(buffer, address, slots=1):
        await proxy.until(lambda: bool(proxy.requests))
        buffer.cancel("lease-0")
        await proxy.until(lambda: proxy.cancelled == ["lease-0/0"])
        proxy.policy = left
        buffer.add(episode(settings=LAKE))
        await buffer.ended()

    assert list(buffer.completed) == ["lease-1"]
    assert not buffer.failed


async def test_stopping_gives_every_lease_back_at_once():
    buffer, proxy = FakeBuffer(), FakeProxy(silent)
    buffer.add(*[episode(settings=LAKE, member=member) for member in range(3)])
    async with serving(proxy.register) as address, working(buffer, address):
        await proxy.until(lambda: len(proxy.requests) == 3)

    assert {failed.outcome for failed in buffer.failed.values()} == {trajectory_pb2.OUTCOME_CANCELLED}
    assert len(buffer.failed) == 3


class ClosesLate(Environment):
    """Closes when it is let go."""

    let_go: asyncio.Event

    async def reset(self, seed: int, index: int) -> str:
        return "at 0 0"

    async def step(self, action: str) -> Step:
        return Step("at 0 0")

    async def close(self) -> None:
        await self.let_go.wait()


async def test_a_lease_is_given_back_before_its_environment_has_closed():
    ClosesLate.let_go = asyncio.Event()
    buffer, proxy = FakeBuffer(), FakeProxy(silent)
    buffer.add(episode(f"{__name__}:ClosesLate"))
    async with serving(proxy.register) as address, working(buffer, address) as running:
        await proxy.until(lambda: len(proxy.requests) == 1)
        running.cancel()
        try:
            async with asyncio.timeout(10):
                await buffer.ended()
            assert not running.done()
        finally:
            ClosesLate.let_go.set()


async def test_an_episode_rides_out_a_restart_of_the_proxy_and_asks_again_under_the_same_name():
    buffer, first = FakeBuffer(), FakeProxy(lambda prompt, asked: left(0, 0) if len(prompt) < 20 else None)
    buffer.add(episode(settings=LAKE))
    serving_first = serving(first.register)
    address = await serving_first.__aenter__()
    async with working(buffer, address):
        await first.until(lambda: len(first.requests) == 2)
        await serving_first.__aexit__(None, None, None)
        second = FakeProxy(left)
        async with serving(second.register, int(address.split(":")[1])):
            await buffer.ended()

    (trajectory,) = buffer.completed.values()
    assert len(trajectory.turns) == 12
    assert second.requests[0] == first.requests[1]
    assert [request.generation.request_id for request in second.requests] == [f"lease-0/{turn}" for turn in range(1, 6)]


async def test_a_result_is_handed_in_when_the_buffer_is_back():
    buffer, proxy = FakeBuffer(refuse=JournalUnavailable("Redis is away.")), FakeProxy(left)
    buffer.add(episode(settings=LAKE))
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.until(lambda: buffer.refused_count == 2)
        buffer.refuse = None
        await buffer.ended()

    assert list(buffer.completed) == ["lease-0"]


class Traces(aio.ServerInterceptor):
    """Notes the trace of each call, by method."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[str]] = defaultdict(list)

    async def intercept_service(self, continuation, handler_call_details):
        header = str(dict(handler_call_details.invocation_metadata)[telemetry.TRACE_METADATA])
        self.of[handler_call_details.method.rpartition("/")[2]].append(header.split("-")[1])
        return await continuation(handler_call_details)


async def test_an_episode_is_one_trace_in_every_service_that_it_calls():
    buffer, proxy, rewards, traces = FakeBuffer(), FakeProxy(left), FakeRewards(), Traces()
    buffer.add(*[episode(settings=LAKE, member=member) for member in range(2)])
    async with serving(proxy.register) as address, working(buffer, address, rewards, interceptors=[traces]):
        await buffer.ended(2)

    asked = {request.generation.session_id: request.generation.trace_id for request in proxy.requests}
    assert len(set(asked.values()) - {""}) == 2
    assert {request.trace_id for request in rewards.requests} == set(asked.values())
    assert not set(asked.values()) & set(traces.of["LeaseEpisodes"])


async def test_a_bug_in_an_episode_fails_it_alone_and_says_what_it_was():
    class Broken(Renderer):
        def begin(self, shown: Observation) -> Conversation:
            if shown.text.startswith("what is"):
                raise RuntimeError("a hole in the template")
            return super().begin(shown)

    buffer, proxy = FakeBuffer(), FakeProxy(left)
    buffer.add(episode("arithmetic"))
    async with serving(proxy.register) as address, working(buffer, address, renderer=Broken(TOKENIZER)):
        await buffer.ended()
        buffer.add(episode(settings=LAKE))
        await buffer.ended(2)

    failed = buffer.failed["lease-0"]
    assert failed.outcome == trajectory_pb2.OUTCOME_ABORTED
    assert failed.detail == "Bug: RuntimeError: a hole in the template."
    assert list(buffer.completed) == ["lease-1"]


async def test_a_bug_outside_of_episodes_takes_the_worker_down_and_its_leases_are_given_back():
    class Broken(FakeBuffer):
        async def Heartbeat(self, request: object, context: object) -> object:
            raise InvalidArgument("a bug")

    buffer, proxy = Broken(lease_seconds=0.6), FakeProxy(silent)
    buffer.add(episode(settings=LAKE))
    with pytest.raises(ExceptionGroup) as crash:
        async with serving(proxy.register) as address, working(buffer, address) as running:
            await asyncio.wait([running])

    assert crash.group_contains(InvalidArgument)
    assert buffer.failed["lease-0"].outcome == trajectory_pb2.OUTCOME_CANCELLED


async def test_a_generation_that_nobody_waits_for_is_cancelled_and_its_late_answer_ignored():
    proxy = FakeProxy(silent)
    asked = llm_proxy_pb2.ProxiedGeneration(generation=engine_pb2.Generation(request_id="r"))
    async with serving(proxy.register) as address, rpc.channel(address) as channel:
        generator = Generator(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), seconds=60)
        running = asyncio.create_task(generator.run())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generator.generate(asked), 0.2)
        await proxy.until(lambda: proxy.cancelled == ["r"])
        proxy.policy = left
        answer = await asyncio.wait_for(generator.generate(asked), 5)
        running.cancel()
        await asyncio.wait([running])

    assert answer.request_id == "r"


async def test_a_generation_that_does_not_come_in_time_is_cancelled_and_each_has_its_own_time():
    proxy = FakeProxy(silent)

    def ask(request_id: str) -> llm_proxy_pb2.ProxiedGeneration:
        return llm_proxy_pb2.ProxiedGeneration(generation=engine_pb2.Generation(request_id=request_id))

    async with serving(proxy.register) as address, rpc.channel(address) as channel:
        generator = Generator(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), seconds=0.2)
        running = asyncio.create_task(generator.run())
        with pytest.raises(TimeoutError, match=r"No generation in 0\.2 s\."):
            await generator.generate(ask("late"))
        proxy.policy = left
        answer = await generator.generate(ask("timely"))
        proxy.policy = silent
        with pytest.raises(TimeoutError):
            await generator.generate(ask("late again"))
        await proxy.until(lambda: proxy.cancelled == ["late", "late again"])
        running.cancel()
        await asyncio.wait([running])

    assert answer.request_id == "timely"


async def test_prompts_that_fit_no_single_message_are_asked_again_when_the_proxy_is_back():
    asked = [
        llm_proxy_pb2.ProxiedGeneration(
            generation=engine_pb2.Generation(request_id=str(number), prompt_token_ids=bytes(rpc.CHUNK_BYTES))
        )
        for number in range(rpc.MAX_MESSAGE_BYTES // rpc.CHUNK_BYTES + 1)
    ]
    first = FakeProxy(silent)
    serving_first = serving(first.register)
    address = await serving_first.__aenter__()
    async with rpc.channel(address) as channel:
        generator = Generator(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), seconds=60)
        running = asyncio.create_task(generator.run())
        answers = [asyncio.create_task(generator.generate(generation)) for generation in asked]
        await first.until(lambda: len(first.requests) == len(asked))
        await serving_first.__aexit__(None, None, None)
        async with serving(FakeProxy(left).register, int(address.split(":")[1])):
            results = await asyncio.wait_for(asyncio.gather(*answers), 20)
        running.cancel()
        await asyncio.wait([running])

    assert [result.request_id for result in results] == [each.generation.request_id for each in asked]
