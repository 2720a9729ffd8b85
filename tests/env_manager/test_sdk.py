"""What an environment's author gets from rollfarm.env."""

import asyncio
import re
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollfarm import rpc
from rollfarm.env import Environment, EnvironmentServicer, Observation, Play, Step, name_of
from rollfarm.errors import EnvironmentFailed, InvalidArgument, UnknownEnvironment, UnknownSession
from rollfarm.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.env_manager.fakes import serving

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
    await play.step("")
    await play.close()

    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


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
        await play.step("1")


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
        await play.step("")
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
