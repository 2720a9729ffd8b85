"""Servers that env_manager dials: which gets an episode, and what becomes of those that are lost."""

import asyncio
import contextlib
import socket
import threading

import pytest

from env_manager import servers
from env_manager.hosts import Hosts
from env_manager.servers import Server, keep, resolve
from rollfarm import rpc
from rollfarm.env import Action, Environment, Observation, Step
from rollfarm.env_server import EnvironmentServicer
from rollfarm.errors import EnvironmentFailed, UnknownEnvironment
from rollfarm.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.env_manager.fakes import serving, worlds_of
from tests.env_manager.hosting import Echo, dialling, until, world_of


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(servers, "OUTAGE_SECONDS", 0.3)
    monkeypatch.setattr(servers, "DESCRIBE_SECONDS", 1.0)


def echoing(**settings) -> EnvironmentServicer:
    return EnvironmentServicer([Echo], **settings)


class Bare(environment_pb2_grpc.EnvironmentServiceServicer):
    """A server in another hand: it says what it is told to."""

    def __init__(self, **answers) -> None:
        self.answers = answers

    def register(self, server) -> None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def Describe(self, request, context):
        return environment_pb2.DescribeResponse(environments=[environment_pb2.EnvironmentInfo(name="echo")])

    async def Reset(self, request, context):
        return self.answers.get("reset", environment_pb2.ResetResponse())

    async def Step(self, request, context):
        return self.answers.get("step", environment_pb2.StepResponse(reward=len(request.action), done=True))


async def test_an_episode_goes_to_the_server_that_plays_the_fewest_and_has_room():
    hosts = Hosts()
    async with (
        serving(echoing(max_sessions=1).register) as small,
        serving(echoing(max_sessions=2).register) as large,
        dialling(hosts, small, large),
        contextlib.AsyncExitStack() as episodes,
    ):
        await until(hosts, lambda seen: all(host.healthy for host in seen) and len(seen) == 2)
        first = contextlib.AsyncExitStack()
        worlds = [await first.enter_async_context(world_of(hosts, session="first"))]
        worlds += [await episodes.enter_async_context(world_of(hosts, session=session)) for session in "ab"]
        running = {host.address: host.running_count for host in hosts.hosts()}
        waiting = asyncio.create_task(episodes.enter_async_context(world_of(hosts, session="c")))
        await asyncio.sleep(0)
        assert not waiting.done()
        await first.aclose()

        assert running == {small: 1, large: 2}
        assert sorted(world.environment_id for world in worlds) == sorted([small, large, large])
        assert (await waiting).environment_id == worlds[0].environment_id


async def test_a_server_that_dies_fails_its_episodes_and_gets_no_more_until_it_is_back():
    hosts = Hosts()
    dying = contextlib.AsyncExitStack()
    lost = await dying.enter_async_context(serving(echoing().register))
    async with serving(echoing().register) as kept, dialling(hosts, kept, lost):
        await until(hosts, lambda seen: all(host.healthy for host in seen) and len(seen) == 2)
        async with world_of(hosts, session="a") as first, world_of(hosts, session="b") as second:
            broken, whole = sorted((first, second), key=lambda world: world.environment_id != lost)
            await dying.aclose()

            with pytest.raises(EnvironmentFailed, match=f"Environment server {lost}: No answer"):
                await broken.step(Action("on"))
            assert (await whole.step(Action("on"))).text == "on"
        await until(hosts, lambda seen: {host.address: host.healthy for host in seen} == {kept: True, lost: False})
        async with world_of(hosts, session="c") as third:
            assert third.environment_id == kept

        async with serving(echoing().register, int(lost.rpartition(":")[2])):
            await until(hosts, lambda seen: all(host.healthy for host in seen))


async def test_every_address_of_a_name_is_a_server_of_its_own_and_they_come_and_go(monkeypatch: pytest.MonkeyPatch):
    hosts = Hosts()
    async with serving(echoing().register) as one, serving(echoing().register) as two:
        named = {one}

        async def found(name: str) -> set[str]:
            return set(named)

        monkeypatch.setattr(servers, "resolve", found)
        async with dialling(hosts, "worlds.example:7730"):
            await until(hosts, lambda seen: [host.address for host in seen if host.healthy] == [one])
            async with world_of(hosts) as world:
                named.add(two)
                await until(hosts, lambda seen: {host.address for host in seen if host.healthy} == {one, two})
                named.remove(one)
                await until(hosts, lambda seen: [host.address for host in seen] == [two])

                assert (await world.step(Action("to its end"))).text == "to its end"


async def test_a_server_that_leaves_while_an_episode_closes_does_not_disturb_it():
    closing, let_go = asyncio.Event(), asyncio.Event()

    class ClosesLate(Echo):
        async def close(self) -> None:
            closing.set()
            await let_go.wait()

    hosts = Hosts()
    async with serving(EnvironmentServicer({"echo": ClosesLate}).register) as address:
        channel = rpc.channel(address, spread=False)
        server = Server(address, hosts.changed, environment_pb2_grpc.EnvironmentServiceStub(channel))
        hosts.add(server)
        keeping = asyncio.create_task(keep(server, channel, hosts))
        await until(hosts, lambda seen: seen[0].healthy)
        episodes = contextlib.AsyncExitStack()
        await episodes.enter_async_context(world_of(hosts))

        ending = asyncio.create_task(episodes.aclose())
        await closing.wait()
        server.leave("It left.")
        await until(hosts, lambda seen: not seen)
        let_go.set()

        await ending
        await keeping


async def test_a_name_is_looked_up_and_an_address_is_not():
    assert await resolve("127.0.0.1:7730") == {"127.0.0.1:7730"}
    assert await resolve("[::1]:7730") == {"[::1]:7730"}
    assert await resolve("dns:///localhost:7730") == {"127.0.0.1:7730"}
    with pytest.raises(socket.gaierror):
        await resolve("no.such.name.invalid:7730")


async def test_an_unknown_environment_names_the_known_ones_of_every_server():
    hosts = Hosts()
    async with serving(echoing().register) as address, dialling(hosts, address):
        await until(hosts, lambda seen: any(host.healthy for host in seen))
        with pytest.raises(UnknownEnvironment, match="Did you mean 'echo'") as refused:
            async with world_of(hosts, "ecko"):
                pass

    assert "echo, frozen_lake" in refused.value.facts["known"]


async def test_a_server_without_score_plays_the_answer_as_the_one_step():
    hosts = Hosts()
    async with serving(Bare().register) as address, dialling(hosts, address), world_of(hosts) as world:
        verdict = await world.score([], "seven")

    assert verdict.reward == 5


IMAGE = environment_pb2.Message(images=[trajectory_pb2.ImagePart()])


@pytest.mark.parametrize(
    ("reset", "cause"),
    [
        (environment_pb2.ResetResponse(tools_json="{}"), "tools_json is dict, not a JSON list"),
        (environment_pb2.ResetResponse(tools_json="[1]"), "tools is no list of mappings"),
        (environment_pb2.ResetResponse(tools_json="[{"), "tools_json is no JSON"),
        (
            environment_pb2.ResetResponse(messages=[IMAGE]),
            "images in instructions, or as what a tool gave",
        ),
        (environment_pb2.ResetResponse(reference="x" * 101), "reset gave 101 characters, more than the 100 of max_obs"),
    ],
)
async def test_a_reset_that_makes_no_sense_is_a_failure_with_the_cause(reset, cause: str):
    hosts = Hosts()
    async with serving(Bare(reset=reset).register) as address, dialling(hosts, address):
        with pytest.raises(EnvironmentFailed, match=cause):
            async with world_of(hosts, most_chars=100):
                pass


async def test_a_step_that_shows_too_much_is_a_failure():
    hosts = Hosts()
    message = environment_pb2.Message(text="x" * 51, tool_call_id="a")
    step = environment_pb2.StepResponse(messages=[message, message])
    async with (
        serving(Bare(step=step).register) as address,
        dialling(hosts, address),
        world_of(hosts, most_chars=100) as world,
    ):
        with pytest.raises(EnvironmentFailed, match="step gave 102 characters"):
            await world.step(Action("on"))


class Hanging(Environment):
    """Hangs where it is told to."""

    let_go = threading.Event()

    def __init__(self, *, at: str = "") -> None:
        self.at = at

    def hang(self, at: str) -> None:
        if self.at == at:
            self.let_go.wait(30)

    def reset(self, seed: int, index: int) -> Observation:
        self.hang("reset")
        return Observation("go")

    def step(self, action: Action) -> Step:
        self.hang("step")
        return Step(done=True)

    def score(self, turns, answer: str) -> Step:
        self.hang("score")
        raise ValueError("nothing to judge")


class Dreaming(Environment):
    """On the loop, it waits for what never comes; or says that its own patience is over."""

    runs = "loop"

    def reset(self, seed: int, index: int) -> Observation:
        return Observation("go")

    async def step(self, action: Action) -> Step:
        if action == "impatient":
            raise TimeoutError("no dream came")
        await asyncio.Event().wait()
        return Step(done=True)


@pytest.mark.parametrize(
    ("said", "cause"),
    [("on", "step gave no answer in 0.1 s."), ("impatient", "step raised TimeoutError: no dream came.")],
)
async def test_what_is_awaited_on_the_loop_is_not_awaited_for_ever(said: str, cause: str):
    task = trajectory_pb2.Task(environment=f"{__name__}:Dreaming")
    async with worlds_of(Hosts(), environment_seconds=0.1).open("dream", task) as world:
        await world.reset()
        with pytest.raises(EnvironmentFailed, match=cause):
            await world.step(Action(said))


async def test_a_call_that_hangs_fails_alone_and_costs_no_more_than_its_thread():
    hosts, before = Hosts(), threading.active_count()
    Hanging.let_go.clear()

    async def fail(at: str) -> str:
        try:
            async with worlds_of(hosts, environment_seconds=0.3).open(
                at, trajectory_pb2.Task(environment=f"{__name__}:Hanging", settings_json=f'{{"at": "{at}"}}')
            ) as world:
                await world.reset()
                await world.step(Action("on"))
                await world.score([], "")
        except EnvironmentFailed as failed:
            return str(failed)
        return ""

    causes = await asyncio.gather(*map(fail, ("reset", "step", "score", "")))

    assert [cause.split(". ")[0] for cause in causes] == [
        "Environment hanging: reset gave no answer in 0.3 s",
        "Environment hanging: step gave no answer in 0.3 s",
        "Environment hanging: score gave no answer in 0.3 s",
        "Environment hanging: score raised ValueError: nothing to judge",
    ]
    assert threading.active_count() <= before + 4
    Hanging.let_go.set()
