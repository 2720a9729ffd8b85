"""What an environment's author gets from rollfarm.env."""

import asyncio
import re
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from env_manager.hosts import Hosts
from rollfarm import rpc
from rollfarm.env import Action, Environment, Observation, Step, name_of, serve
from rollfarm.env_server import EnvironmentServicer
from rollfarm.errors import EnvironmentFailed, InvalidArgument, UnknownEnvironment, UnknownSession
from rollfarm.playing import Play
from rollfarm.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.env_manager.fakes import serving, worlds_of
from tests.env_manager.hosting import letting_in, until

ROOT = Path(__file__).parents[2]


class CountDown(Environment):
    """Count down to zero."""

    max_turns = 9
    closed: list[int] = []

    def __init__(self, *, start: int = 3) -> None:
        self.start = self.left = start

    def reset(self, seed: int, index: int) -> Observation:
        return Observation(f"{self.left}", reference="0", state_hash=str(self.left), system="count")

    def step(self, action: str) -> Step:
        self.left -= int(action)
        return Step(
            str(self.left), reward=1.0, done=self.left == 0, state_hash=str(self.left), metrics={"left": self.left}
        )

    def close(self) -> None:
        self.closed.append(self.start)


class Waiting(Environment):
    async def reset(self, seed: int, index: int) -> str:
        await asyncio.sleep(0)
        return f"seed {seed} index {index}"

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        return Step(action, done=True)


@asynccontextmanager
async def serving_count_down(**settings):
    server = EnvironmentServicer([CountDown, Waiting], **settings)
    async with serving(server.register) as address, rpc.channel(address) as channel:
        yield Client(environment_pb2_grpc.EnvironmentServiceStub(channel))


class Client:
    def __init__(self, stub) -> None:
        self.stub = stub

    async def describe(self) -> environment_pb2.DescribeResponse:
        return await rpc.call(self.stub.Describe, environment_pb2.DescribeRequest(), timeout=5)

    async def reset(self, session: str, environment: str = "count_down", settings: str = "", seed: int = 0):
        task = trajectory_pb2.Task(environment=environment, settings_json=settings, seed=seed, index=4)
        return await rpc.call(
            self.stub.Reset, environment_pb2.ResetRequest(session_id=session, task=task), timeout=5, retry=False
        )

    async def step(self, session: str, step: int, action: str = "1"):
        request = environment_pb2.StepRequest(session_id=session, step=step, action=action)
        return await rpc.call(self.stub.Step, request, timeout=5, retry=False)

    async def close(self, session: str) -> None:
        await rpc.call(self.stub.Close, environment_pb2.CloseRequest(session_id=session), timeout=5)


async def test_a_server_describes_what_it_plays():
    async with serving_count_down() as client:
        answer = await client.describe()

    assert [(info.name, info.description, info.max_turns) for info in answer.environments] == [
        ("count_down", "Count down to zero.", 9),
        ("waiting", "", 0),
    ]


async def test_an_episode_is_played_to_its_end():
    async with serving_count_down() as client:
        shown = await client.reset("a", settings='{"start": 2}')
        steps = [await client.step("a", 0), await client.step("a", 1)]
        await client.close("a")

    assert [(message.author, message.text) for message in shown.messages] == [
        (trajectory_pb2.AUTHOR_SYSTEM, "count"),
        (trajectory_pb2.AUTHOR_ENVIRONMENT, "2"),
    ]
    assert (shown.reference, shown.state_hash) == ("0", "2")
    assert [(step.messages[0].text, step.done, step.metrics["left"]) for step in steps] == [
        ("1", False, 1),
        ("0", True, 0),
    ]
    assert CountDown.closed[-1] == 2


async def test_a_retried_call_gets_the_first_answer_and_is_played_once():
    async with serving_count_down() as client:
        first, again = await client.reset("a"), await client.reset("a")
        step, step_again = await client.step("a", 0), await client.step("a", 0, action="2")

    assert first == again
    assert step == step_again
    assert step.messages[0].text == "2"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_step_whose_caller_was_cut_off_is_not_played_again_by_a_retry(is_async: bool):
    begun, go_on = threading.Event(), threading.Event()
    played: list[str] = []

    class Slow(Waiting):
        async def step(self, action: str) -> Step:
            begun.set()
            await asyncio.to_thread(go_on.wait, 20)
            played.append(action)
            return Step(action)

    class SlowInAThread(CountDown):
        def step(self, action: str) -> Step:
            begun.set()
            go_on.wait(20)
            played.append(action)
            return Step(action)

    server = EnvironmentServicer({"slow": Slow if is_async else SlowInAThread})
    task = trajectory_pb2.Task(environment="slow")
    await server.Reset(environment_pb2.ResetRequest(session_id="a", task=task), None)
    step = environment_pb2.StepRequest(session_id="a", step=0, action="go")
    cut_off = asyncio.create_task(server.Step(step, None))
    await asyncio.to_thread(begun.wait, 20)
    cut_off.cancel()
    retried = asyncio.create_task(server.Step(step, None))
    await asyncio.sleep(0)
    go_on.set()

    assert (await retried).messages[0].text == "go"
    assert played == ["go"]
    await server.close()


async def test_a_step_that_is_being_played_ends_with_the_episode():
    begun = asyncio.Event()

    class Stuck(Waiting):
        async def step(self, action: str) -> Step:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError("nobody set it")

    server = EnvironmentServicer({"stuck": Stuck})
    task = trajectory_pb2.Task(environment="stuck")
    await server.Reset(environment_pb2.ResetRequest(session_id="a", task=task), None)
    step = asyncio.create_task(server.Step(environment_pb2.StepRequest(session_id="a", step=0), None))
    await begun.wait()

    await server.Close(environment_pb2.CloseRequest(session_id="a"), None)

    with pytest.raises(UnknownSession, match="was closed"):
        await step


async def test_a_step_out_of_order_is_refused():
    async with serving_count_down() as client:
        await client.reset("a")
        with pytest.raises(InvalidArgument, match="Step 2 does not follow step -1"):
            await client.step("a", 2)


async def test_an_episode_that_is_not_open_is_unknown():
    async with serving_count_down() as client:
        await client.reset("a")
        await client.close("a")
        with pytest.raises(UnknownSession):
            await client.step("a", 0)


async def test_the_episodes_left_alone_longest_make_room():
    async with serving_count_down(max_sessions=2) as client:
        for session in ("a", "b"):
            await client.reset(session)
        await client.step("a", 0)
        await client.reset("c")

        with pytest.raises(UnknownSession):
            await client.step("b", 0)
        assert (await client.step("a", 1)).messages[0].text == "1"


async def test_an_unknown_environment_or_setting_names_the_nearest():
    async with serving_count_down() as client:
        with pytest.raises(UnknownEnvironment, match="Did you mean 'count_down'"):
            await client.reset("a", "countdown")
        with pytest.raises(InvalidArgument, match="unknown setting 'strat'"):
            await client.reset("a", settings='{"strat": 1}')
        with pytest.raises(InvalidArgument, match="start: Input should be a valid integer"):
            await client.reset("a", settings='{"start": "many"}')


async def test_whatever_it_raises_is_the_episodes_failure_with_the_cause():
    async with serving_count_down() as client:
        await client.reset("a")
        with pytest.raises(EnvironmentFailed, match="count_down: step raised ValueError: invalid literal"):
            await client.step("a", 0, action="one")
        assert (await client.step("a", 0)).messages[0].text == "2"


async def test_an_async_environment_and_a_text_for_an_observation_are_fine():
    async with serving_count_down() as client:
        shown = await client.reset("a", "waiting", seed=7)
        step = await client.step("a", 0, action="hello")

    assert (shown.messages[0].text, step.messages[0].text, step.done) == ("seed 7 index 4", "hello", True)


async def test_all_calls_of_an_episode_are_made_in_one_thread_that_is_not_the_loops():
    threads: list[int] = []

    class Threaded(Environment):
        def __init__(self) -> None:
            threads.append(threading.get_ident())

        def reset(self, seed: int, index: int) -> str:
            threads.append(threading.get_ident())
            return ""

        def step(self, action: str) -> Step:
            threads.append(threading.get_ident())
            return Step(done=True)

    play = Play(Threaded, {})
    await play.reset(0, 0)
    await play.step(Action(""))
    await play.close()

    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


async def test_an_async_environment_needs_no_thread():
    before, plays = threading.active_count(), [Play(Waiting, {}) for _ in range(100)]
    for play in plays:
        await play.reset(0, 0)
        await play.step(Action("go"))

    assert threading.active_count() <= before
    for play in plays:
        await play.close()
    assert threading.active_count() <= before


@pytest.mark.parametrize("where", ["init", "step"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_environment_in_a_call_that_nobody_waits_for_is_closed_after_it(where: str, is_async: bool):
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> None:
        begun.set()
        go_on.wait(20)

    class Slow(CountDown):
        def __init__(self) -> None:
            super().__init__()
            if where == "init":
                slowly()

        def step(self, action: str) -> Step:
            slowly()
            return Step()

        def close(self) -> Any:
            async def later() -> None:
                closed.set()

            return later() if is_async else closed.set()

    play = Play(Slow, {})
    if where == "init":
        calling = asyncio.create_task(play.reset(0, 0))
    else:
        await play.reset(0, 0)
        calling = asyncio.create_task(play.step(Action("")))
    await asyncio.to_thread(begun.wait, 20)

    calling.cancel()
    await play.close()
    go_on.set()

    assert await asyncio.to_thread(closed.wait, 20)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_close_that_hangs_is_not_waited_for_any_longer_than_it_may_take(is_async: bool):
    let_go = threading.Event()

    class Hanging(CountDown):
        def close(self) -> Any:
            return asyncio.Event().wait() if is_async else let_go.wait(20)

    play = Play(Hanging, {})
    await play.reset(0, 0)

    async with asyncio.timeout(10):
        await play.close(0.1)

    let_go.set()
    with pytest.raises(UnknownSession):
        await play.step(Action("1"))


@pytest.mark.parametrize(
    ("answer", "cause"),
    [("text", "step returned str, not a Step"), (Step(reward=float("inf")), "reward is inf, not a finite number")],
)
async def test_an_answer_that_makes_no_sense_is_a_failure(answer: object, cause: str):
    class Senseless(Environment):
        def reset(self, seed: int, index: int) -> str:
            return ""

        def step(self, action: str) -> Step:
            return answer  # pyright: ignore[reportReturnType]

    play = Play(Senseless, {})
    await play.reset(0, 0)
    with pytest.raises(EnvironmentFailed, match=cause):
        await play.step(Action(""))
    await play.close()


def test_the_name_is_the_classs_in_snake_case_unless_it_says_another():
    class MyWorld(Environment):
        pass

    class Other(Environment):
        name = "another"

    assert (name_of(MyWorld), name_of(Other)) == ("my_world", "another")  # pyright: ignore[reportArgumentType]


async def test_the_example_is_a_whole_environment_in_fewer_than_forty_lines():
    example = ROOT / "examples" / "coin_server.py"
    assert len(example.read_text().splitlines()) < 40
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(example), "--port", "0", stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    line = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
    address = re.search(r"127\.0\.0\.1:\d+", line)
    assert address, line
    async with rpc.channel(address[0]) as channel:
        client = Client(environment_pb2_grpc.EnvironmentServiceStub(channel))
        shown = (await client.reset("a", "coin")).messages[0].text
        steps = []
        for number in range(3):
            other = {"heads": "tails", "tails": "heads"}[shown.split()[-1]]
            steps.append(await client.step("a", number, other))
            shown = steps[-1].messages[0].text

    process.terminate()
    assert await asyncio.wait_for(process.wait(), 15) == 0
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    assert (steps[-1].done, steps[-1].metrics["success"]) == (True, 1.0)


async def test_the_example_dials_in_with_the_token_that_lies_in_a_file_until_it_is_stopped(tmp_path: Path):
    (tmp_path / "token").write_text("a token that nobody guesses\n")
    hosts = Hosts()
    async with letting_in(hosts, token="a token that nobody guesses") as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "examples" / "coin_server.py")),
            *("--attach", address, "--token", f"file:{tmp_path / 'token'}"),
            cwd=ROOT,
        )
        await until(hosts, lambda seen: [list(host.environments) for host in seen] == [["coin"]])
        async with worlds_of(hosts).open("a", trajectory_pb2.Task(environment="coin", seed=7)) as world:
            shown = (await world.reset()).text

        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        await until(hosts, lambda seen: not seen)

    assert shown.startswith("the coin shows")


@pytest.mark.parametrize(
    ("token", "message"),
    [("sesame", "--token: a token is not shown to everyone"), ("env:NOT_THERE", "NOT_THERE holds no key of 16")],
)
def test_a_token_on_the_command_line_and_one_that_is_not_there_are_refused(
    token: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        serve(CountDown, argv=["--attach", "127.0.0.1:1", "--token", token])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err
