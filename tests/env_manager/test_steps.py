"""Steps that travel together: the stream of steps, and what becomes of them when it is not there or breaks."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from env_manager.hosts import Hosts
from env_manager.worlds import World
from rollfarm import telemetry
from rollfarm.env import Action, Environment, Step
from rollfarm.env_server import EnvironmentServicer
from rollfarm.errors import EnvironmentFailed
from rollfarm.rpc import portions
from rollfarm.v1 import environment_pb2, environment_pb2_grpc
from tests.env_manager.fakes import serving
from tests.env_manager.hosting import Echo, dialling, world_of


class Listening(EnvironmentServicer):
    """Knows how steps came to it."""

    def __init__(self, *kinds: type[Environment], **settings) -> None:
        super().__init__(kinds or [Echo], **settings)
        self.messages: list[int] = []
        """Steps in each message of a stream."""
        self.calls = 0
        """Steps that came by themselves."""
        self.opened = asyncio.Event()

    async def Step(self, request, context):
        self.calls += context is not None
        return await super().Step(request, context)

    async def StepMany(self, request_iterator, context):
        async for answers in super().StepMany(self._listen(aiter(request_iterator)), context):
            yield answers

    async def _listen(self, asked: AsyncIterator[environment_pb2.StepManyRequest]):
        self.opened.set()
        async for message in asked:
            self.messages.append(len(message.steps))
            yield message


class Plain(environment_pb2_grpc.EnvironmentServiceServicer):
    """A server that has no more than it must."""

    def __init__(self) -> None:
        self.listening = Listening()
        for name in ("Describe", "Reset", "Step", "Close"):
            setattr(self, name, getattr(self.listening, name))

    def register(self, server) -> None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)


@asynccontextmanager
async def playing(server: EnvironmentServicer | Plain, *sessions: str, environment: str = "echo", **settings):
    """The worlds of episodes on a server, once their steps travel on its stream."""
    hosts = Hosts()
    async with serving(server.register) as address, dialling(hosts, address), AsyncExitStack() as episodes:
        worlds = [
            await episodes.enter_async_context(world_of(hosts, environment, session, **settings))
            for session in sessions
        ]
        host = next(iter(hosts._hosts))
        async with asyncio.timeout(20):
            while not host.steps.is_open:  # pyright: ignore  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield worlds


async def said(world: World, word: str) -> str:
    return (await world.step(Action(word))).text


async def test_steps_of_many_episodes_travel_together():
    server = Listening()
    async with playing(server, *"abcd") as worlds:
        for word in ("one", "two", "three"):
            assert await asyncio.gather(*(said(world, word) for world in worlds)) == [word] * 4

    assert (sum(server.messages), server.calls) == (12, 0)
    assert len(server.messages) < 12


async def test_a_server_without_the_stream_is_asked_step_by_step():
    server = Plain()
    hosts = Hosts()
    async with serving(server.register) as address, dialling(hosts, address), world_of(hosts) as world:
        assert [await said(world, word) for word in ("one", "two")] == ["one", "two"]

    assert server.listening.calls == 2


class Garbled(Plain):
    """Its stream answers what is no message."""

    def register(self, server) -> None:
        self.add_generic_rpc_handlers = lambda handlers: None
        self.add_registered_method_handlers = lambda service, handlers: server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    service, {**handlers, "StepMany": grpc.stream_stream_rpc_method_handler(self.garble)}
                )
            ]
        )
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, self)  # pyright: ignore

    async def garble(self, request_iterator, context) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(())
        async for _ in request_iterator:
            yield b"\xff\xff"


async def test_a_stream_that_cannot_be_read_costs_no_episode():
    server = Garbled()
    async with playing(server, "a") as (world,):
        assert [await said(world, word) for word in ("one", "two")] == ["one", "two"]

    assert server.listening.calls == 2


class Gated(Environment):
    """Answers when it may, and counts its steps."""

    gates: dict[str, threading.Event] = {}
    steps: list[str] = []

    def reset(self, seed: int, index: int) -> str:
        return "go"

    def step(self, action: Action) -> Step:
        self.steps.append(str(action))
        if action in self.gates:
            self.gates[action].wait(20)
        if action == "fail":
            raise ValueError("asked to")
        return Step(f"{action} done")


@pytest.fixture
def gate():
    Gated.steps.clear()
    Gated.gates["wait"] = opened = threading.Event()
    yield opened
    opened.set()


async def test_a_slow_step_holds_up_no_other_and_fails_alone(gate: threading.Event):
    server = Listening(Gated)
    async with playing(server, "a", "b", environment="gated", environment_seconds=0.5) as (slow, quick):
        waiting = asyncio.create_task(said(slow, "wait"))
        answers = [await said(quick, word) for word in ("one", "two")]
        with pytest.raises(EnvironmentFailed, match=r"No answer to a step in 0.5 s"):
            await waiting
        assert answers == ["one done", "two done"]
        assert await said(quick, "three") == "three done"

    assert server.calls == 0


async def test_a_step_that_raises_fails_its_episode_and_leaves_the_stream_whole(gate: threading.Event):
    server = Listening(Gated)
    async with playing(server, "a", "b", environment="gated") as (one, other):
        with pytest.raises(EnvironmentFailed, match="step raised ValueError: asked to") as failed:
            await one.step(Action("fail"))
        assert await said(other, "on") == "on done"

    assert failed.value.__cause__ is not None
    assert (server.messages, server.calls) == ([1, 1], 0)


async def test_a_step_whose_stream_breaks_is_asked_again_and_played_once(gate: threading.Event):
    class Breaking(Listening):
        async def StepMany(self, request_iterator, context):
            async for answers in super().StepMany(request_iterator, context):
                yield answers
                raise RuntimeError("broken")

    server = Breaking(Gated)
    async with playing(server, "a", "b", environment="gated") as (slow, quick):
        waiting = asyncio.create_task(said(slow, "wait"))
        while "wait" not in Gated.steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await said(quick, "on")
        async with asyncio.timeout(20):
            while not server.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        gate.set()

        assert await waiting == "wait done"
    assert sorted(Gated.steps) == ["on", "wait"]


class Endless(Environment):
    """Its step never ends by itself."""

    ended: asyncio.Event

    async def reset(self, seed: int, index: int) -> str:
        Endless.ended = asyncio.Event()
        return "go"

    async def step(self, action: Action) -> Step:
        try:
            await asyncio.sleep(3600)
        finally:
            self.ended.set()
        return Step("")


async def test_a_step_that_nobody_waits_for_ends_with_its_episode():
    async with playing(Listening(Endless), "a", environment="endless", environment_seconds=0.2) as (world,):
        with pytest.raises(EnvironmentFailed, match="No answer to a step"):
            await world.step(Action("on"))
        assert not Endless.ended.is_set()
        await world.close()

        await asyncio.wait_for(Endless.ended.wait(), 20)


async def test_a_server_that_drains_ends_the_stream_with_its_last_answer(gate: threading.Event):
    server = Listening(Gated)
    async with playing(server, "a", environment="gated") as (world,):
        waiting = asyncio.create_task(said(world, "wait"))
        while "wait" not in Gated.steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await server.drain()
        gate.set()

        assert await waiting == "wait done"
        assert server.calls == 0


async def test_a_step_belongs_to_the_trace_of_its_episode():
    traces: list[str] = []

    class Traced(Echo):
        def step(self, action: Action) -> Step:
            traces.append(telemetry.trace_id.get())
            return Step("")

    telemetry.begin_trace()
    server = Listening(Traced)
    async with playing(server, "a", environment="traced") as (world,):
        await world.step(Action("on"))

    assert traces == [telemetry.trace_id.get()]
    assert server.messages == [1]


def test_a_message_has_so_many_steps_at_most():
    steps = [environment_pb2.StepRequest(step=number) for number in range(5)]

    assert [[step.step for step in some] for some in portions(steps, most=2)] == [[0, 1], [2, 3], [4]]
