"""Workers that dial in to env_manager, over real sockets."""

import asyncio
import contextlib

import pytest

from env_manager import attached as attached_module
from env_manager.attached import check_token
from env_manager.hosts import Hosts
from rollfarm import rpc
from rollfarm.env import Action, Environment, Observation, Step, ToolCall, ToolResult
from rollfarm.env_attach import attach
from rollfarm.errors import EnvironmentFailed, InvalidArgument, WrongToken
from rollfarm.reward import Turn
from rollfarm.v1.environment_pb2 import (
    AttachRequest,
    AttachResponse,
    DescribeResponse,
    EnvironmentHost,
    EnvironmentInfo,
    Message,
    ResetResponse,
)
from rollfarm.v1.environment_pb2_grpc import EnvManagerServiceStub
from tests.env_manager.hosting import Echo, attached, letting_in, until, world_of

TOKEN = "a token that nobody guesses"


class Tools(Environment):
    """Answers with what it was told."""

    async def reset(self, seed: int, index: int) -> Observation:
        return Observation("go", system="be brief", tools=[{"type": "function", "function": {"name": "look"}}])

    async def step(self, action: Action) -> Step:
        if action.tool_problem:
            return Step(action.tool_problem)
        results = [ToolResult(call.tool_call_id, call.name, str(call.arguments["x"])) for call in action.tool_calls]
        return Step("seen", tool_results=results)

    async def score(self, turns, answer: str) -> Step:
        return Step(f"{len(turns)} turns", reward=float(answer), metrics={"success": 1.0})


class Stuck(Environment):
    async def reset(self, seed: int, index: int) -> str:
        return "go"

    async def step(self, action: Action) -> Step:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_worker_plays_any_number_of_episodes_at_once_on_its_stream():
    hosts = Hosts()
    async with letting_in(hosts) as address, attached(address, Echo):
        await until(hosts, lambda seen: len(seen) == 1)

        async def play(session: str) -> tuple[str, bool]:
            async with world_of(hosts, session=session) as world:
                steps = [await world.step(Action(f"{session} {turn}")) for turn in range(3)]
                return steps[-1].text, (await world.step(Action("bye"))).done

        played = await asyncio.gather(*(play(f"session-{number}") for number in range(50)))

        assert played == [(f"session-{number} 2", True) for number in range(50)]
        assert [(seen.kind, seen.healthy, list(seen.environments), seen.running_count) for seen in hosts.hosts()] == [
            (EnvironmentHost.KIND_ATTACHED, True, ["echo"], 0)
        ]


async def test_tools_and_scores_travel():
    hosts = Hosts()
    async with letting_in(hosts) as address, attached(address, Tools):
        await until(hosts, lambda seen: len(seen) == 1)
        async with world_of(hosts, "tools") as world:
            shown = await world.reset()
            step = await world.step(Action("", [ToolCall("c1", "look", {"x": 3}), ToolCall("c2", "look", {"x": "é"})]))
            problem = await world.step(Action("{", tool_problem="no JSON"))
            verdict = await world.score([Turn("environment", "go"), Turn("policy", "hm", 0.5)], "0.25")

    assert (shown.text, shown.system, shown.tools) == (
        "go",
        "be brief",
        [{"type": "function", "function": {"name": "look"}}],
    )
    assert (step.text, step.tool_results) == ("seen", [ToolResult("c1", "look", "3"), ToolResult("c2", "look", "é")])
    assert problem.text == "no JSON"
    assert (verdict.reward, verdict.text, verdict.metrics) == (0.25, "2 turns", {"success": 1.0})


async def test_a_lost_stream_fails_its_episodes_alone_and_the_worker_dials_again():
    hosts = Hosts()
    door = contextlib.AsyncExitStack()
    address = await door.enter_async_context(letting_in(hosts))
    async with letting_in(hosts) as other, attached(other, Echo), attached(address, Stuck):
        await until(hosts, lambda seen: len(seen) == 2)
        async with world_of(hosts, "echo") as kept, world_of(hosts, "stuck") as lost:
            step = asyncio.create_task(lost.step(Action("on")))
            await door.aclose()

            with pytest.raises(EnvironmentFailed, match=r"Environment worker ipv4:127\.0\.0\.1:\d+: Its stream ended"):
                await step
            assert (await kept.step(Action("still here"))).text == "still here"
        assert hosts.environments == {"echo"}
        async with letting_in(hosts, port=int(address.rpartition(":")[2])):
            await until(hosts, lambda seen: hosts.environments == {"echo", "stuck"})


async def test_a_worker_that_stops_answers_what_it_was_asked_and_leaves():
    let_go, asked = asyncio.Event(), asyncio.Event()

    class Slow(Echo):
        async def step(self, action: Action) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
            asked.set()
            await let_go.wait()
            return Step("done")

    hosts = Hosts()
    async with letting_in(hosts) as address, attached(address, Slow) as stop:
        await until(hosts, lambda seen: len(seen) == 1)
        async with world_of(hosts, "slow") as world:
            step = asyncio.create_task(world.step(Action("")))
            await asked.wait()
            stop.set()
            await asyncio.sleep(0)
            let_go.set()

            assert (await step).text == "done"
            await until(hosts, lambda seen: not seen)
            with pytest.raises(EnvironmentFailed, match="Its stream ended"):
                await world.step(Action(""))


async def test_a_worker_that_says_nothing_for_long_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attached_module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(attached_module, "SILENCE_SECONDS", 0.2)
    hosts = Hosts()
    async with letting_in(hosts) as address, rpc.channel(address) as channel:
        stream = EnvManagerServiceStub(channel).Attach()
        await stream.write(AttachRequest(hello=DescribeResponse(environments=[EnvironmentInfo(name="echo")])))
        await until(hosts, lambda seen: len(seen) == 1)
        with pytest.raises(EnvironmentFailed, match=r"It said nothing for 0\.2 s"):
            async with world_of(hosts):
                pass

        await until(hosts, lambda seen: not seen)


@pytest.mark.parametrize("token", ["", "another token, and a wrong one"])
async def test_a_wrong_token_is_refused_for_good(token: str):
    hosts = Hosts()
    async with letting_in(hosts, token=TOKEN) as address:
        with pytest.raises(WrongToken, match="missing or wrong"):
            async with asyncio.timeout(10):
                await attach([Echo], address, asyncio.Event(), token=token)

    assert hosts.hosts() == []


async def test_the_right_token_lets_a_worker_in():
    hosts = Hosts()
    async with letting_in(hosts, token=TOKEN) as address, attached(address, Echo, token=TOKEN):
        await until(hosts, lambda seen: len(seen) == 1)


@pytest.mark.parametrize(
    ("peer", "is_let_in"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", True),
        ("unix:", True),
        ("ipv4:10.0.0.7:5000", False),
        ("ipv6:%5B2001:db8::1%5D:5000", False),
        ("nonsense", False),
    ],
)
def test_without_a_token_only_this_machine_is_let_in(peer: str, is_let_in: bool):
    try:
        check_token("", (), peer)
        let_in = True
    except WrongToken:
        let_in = False

    assert let_in is is_let_in


async def test_a_worker_that_says_no_hello_is_refused():
    hosts = Hosts()
    async with letting_in(hosts) as address, rpc.channel(address) as channel:
        with pytest.raises(InvalidArgument, match="no hello"):
            async for _ in rpc.stream(
                lambda request, **options: EnvManagerServiceStub(channel).Attach(iter([request]), **options),
                AttachRequest(call_id="7"),
                timeout=10,
            ):
                pass


async def test_bytes_that_are_no_text_end_the_stream_and_fail_its_episodes():
    hosts = Hosts()
    hello = AttachRequest(hello=DescribeResponse(environments=[EnvironmentInfo(name="echo")]))
    async with letting_in(hosts) as address, rpc.channel(address) as channel:
        stream = channel.stream_stream(
            "/rollfarm.v1.EnvManagerService/Attach",
            request_serializer=bytes,
            response_deserializer=AttachResponse.FromString,
        )()
        await stream.write(hello.SerializeToString())
        await until(hosts, lambda seen: len(seen) == 1)

        async def answer() -> None:
            call = await stream.read()
            assert isinstance(call, AttachResponse)
            good = AttachRequest(call_id=call.call_id, reset=ResetResponse(messages=[Message(text="binary")]))
            await stream.write(good.SerializeToString().replace(b"binary", b"\xff\xfe\xfd\xfc\xfb\xfa"))

        answering = asyncio.create_task(answer())
        with pytest.raises(EnvironmentFailed, match="no valid message; text is UTF-8"):
            async with world_of(hosts):
                pass
        await answering
