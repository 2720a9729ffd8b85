"""Scores over real sockets, from workers that are real processes."""

import asyncio
import re
import subprocess
import sys

import psutil
import pytest

from reward_gateway.domains import Domain
from reward_gateway.pool import WorkerPool, _Worker
from reward_gateway.timeouts import Timeout
from reward_gateway.wiring import open_gateway
from rollfarm import rpc
from rollfarm.errors import RewardFailed, UnknownDomain
from rollfarm.reward import Episode
from rollfarm.reward_server import RewardServicer
from rollfarm.v1 import reward_gateway_pb2
from tests.reward_gateway import rewards_of_ones_own as own
from tests.reward_gateway.support import OWN, asking, config, episode, scoring, serving


async def test_a_domains_rewards_are_asked_and_added_up():
    rewards = [{"name": "environment", "weight": 0.5}, {"name": "exact"}]
    async with scoring(config(*rewards)) as score:
        response = await score(episode("Rome", reference="rome", steps=(0.4,)))

    assert response.reward == pytest.approx(1.2)
    assert [part.name for part in response.parts] == ["environment", "exact"]


async def test_many_are_answered_one_by_one_and_a_failure_is_of_its_own_episode():
    slow = {"name": f"{OWN}:patient", "settings": {"seconds": 0.3}}
    both = config({"name": "exact"})
    domains = {**both.domains, "slow": config(slow).domains["d"]}
    episodes = [episode("a", domain="slow"), episode("b"), episode("c", reference="c"), episode("d", domain="other")]
    async with scoring(both.model_copy(update={"domains": domains})) as score:
        answers = [answer async for answer in score.many(*episodes)]

    first, last = {each.index: each for each in answers[0].results}, answers[-1].results
    assert (sorted(first), [each.index for each in last]) == ([1, 2, 3], [0])
    assert (first[2].scored.reward, last[0].scored.reward) == (1.0, 1.0)
    assert (first[1].failure.reason, first[3].failure.reason) == ("REWARD_FAILED", "UNKNOWN_DOMAIN")


class Broken(Domain):
    """Meets a bug where the answer says so."""

    async def score(self, request: reward_gateway_pb2.ScoreRequest) -> reward_gateway_pb2.ScoreResponse:
        if request.episode.turns[0].text == "bug":
            raise KeyError("a hole in the domain")
        return await super().score(request)


async def test_a_bug_in_one_of_many_fails_it_alone_and_says_what_it_was():
    async with open_gateway(config({"name": f"{OWN}:patient"})) as gateway:
        sound = gateway.domains["d"]
        gateway.domains = {"d": Broken("d", sound.askers, sound.bulkhead)}
        async with asking(gateway) as score:
            answers = [answer async for answer in score.many(episode("bug"), episode("a"))]

    found = {result.index: result for answer in answers for result in answer.results}
    assert (found[0].failure.reason, found[1].scored.reward) == ("REWARD_FAILED", 1.0)
    assert found[0].failure.message.startswith("Bug: KeyError: 'a hole in the domain'.")


async def test_each_of_many_goes_on_with_its_own_trace():
    async with scoring(config({"name": f"{OWN}:traced"})) as score:
        (answer,) = [answer async for answer in score.many(episode("a"), episode("b"), trace_ids=("1" * 32, "2" * 32))]

    found = {result.index: result.scored.parts[0].detail for result in answer.results}
    assert found == {0: "1" * 32, 1: "2" * 32}


async def test_one_of_many_that_is_cancelled_is_scored_no_further_and_the_others_are():
    own.GATE["rest"] = asyncio.Event()
    unwanted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    async with scoring(config({"name": f"{OWN}:gated"})) as score:

        async def ask() -> list[reward_gateway_pb2.ScoreManyResponse]:
            return [answer async for answer in score.many(episode("never"), episode("rest"), unwanted=unwanted)]

        asked = asyncio.create_task(ask())
        await score.until(lambda domain: domain.running_count == 2)
        unwanted.set_result([2, -1, 0])
        await score.until(lambda domain: domain.running_count == 1)
        own.GATE["rest"].set()
        answers = await asked

    assert [[result.index for result in answer.results] for answer in answers] == [[1]]


async def test_a_caller_of_many_that_hangs_up_leaves_no_score_running():
    async with scoring(config({"name": f"{OWN}:patient", "settings": {"seconds": 60}})) as score:

        async def ask() -> None:
            await anext(score.many(episode("a"), episode("b")))

        asking = asyncio.create_task(ask())
        await score.until(lambda domain: domain.running_count == 2)
        asking.cancel()
        await score.until(lambda domain: domain.running_count == 0)


async def test_an_unknown_domain_is_refused_with_the_known_ones():
    async with scoring(config({"name": "exact"})) as score:
        with pytest.raises(UnknownDomain, match="Known: d"):
            await score(episode("a", domain="other"))


async def test_a_function_of_ones_own_runs_in_a_worker_with_its_settings():
    async with scoring(config({"name": f"{OWN}:length", "settings": {"most": 3}})) as score:
        response = await score(episode("hello"))

    assert (response.reward, response.parts[0].detail) == (3.0, "of 3")


async def test_a_hanging_reward_fails_its_own_score_and_nothing_else():
    rewards = config({"name": f"{OWN}:hangs"}, timeout_seconds=1.5)
    async with scoring(rewards) as score:
        with pytest.raises(RewardFailed, match=r"gave no score in 1\.5 s; its worker was replaced"):
            await score(episode("hang"))
        response = await score(episode("go on"))

    assert response.reward == 1.0


async def test_the_loop_answers_others_while_a_reward_hangs():
    rewards = config({"name": f"{OWN}:hangs"}, timeout_seconds=2.0)
    gateway_config = rewards.model_copy(
        update={"domains": {**rewards.domains, **config({"name": "exact"}).domains, "slow": rewards.domains["d"]}}
    )
    async with scoring(gateway_config) as score:
        slow = asyncio.create_task(score(episode("hang", domain="slow")))
        answered = [(await score(episode("a", reference="a"))).reward for _ in range(20)]
        assert not slow.done()
        with pytest.raises(RewardFailed):
            await slow

    assert answered == [1.0] * 20


async def test_a_reward_that_takes_its_worker_down_fails_and_the_worker_is_replaced():
    async with scoring(config({"name": f"{OWN}:dies"})) as score:
        with pytest.raises(RewardFailed, match="took its worker down"):
            await score(episode("die"))
        response = await score(episode("live"))

    assert response.reward == 1.0


async def test_a_reward_that_raises_says_what():
    async with scoring(config({"name": "exact"})) as score:
        with pytest.raises(RewardFailed, match="Reward exact raised ValueError: environment 'quiz' gives no reference"):
            await score(episode("a"))


async def test_an_async_reward_that_is_late_fails():
    rewards = {"name": f"{OWN}:patient", "settings": {"seconds": 30}}
    async with scoring(config(rewards, timeout_seconds=0.2)) as score:
        with pytest.raises(RewardFailed, match=r"gave no score in 0\.2 s"):
            await score(episode("a"))


async def ask(pool: WorkerPool, reward: str, answer: str) -> float:
    patient = Timeout(least=30, factor=1, most=30, window=1)
    scores = await pool.score(f"{OWN}:{reward}", {}, [episode(answer)], patient)
    return scores[0].value


async def test_a_caller_that_gives_up_leaves_no_stale_answer_behind():
    async with WorkerPool(1) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ask(pool, "hangs", "hang")
        value = await ask(pool, "length", "four")

    assert value == 4.0


async def test_a_caller_that_gives_up_while_a_new_worker_starts_leaves_no_stale_answer_behind():
    async with WorkerPool(1) as pool:
        with pytest.raises(RewardFailed, match="took its worker down"):
            await ask(pool, "dies", "die")
        given_up = asyncio.create_task(ask(pool, "length", "one"))
        while pool._workers[0]._process is None:  # noqa: ASYNC110 - nothing tells that a process is being started
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        values = [await ask(pool, "length", said) for said in ("four", "fi")]

    assert values == [4.0, 2.0]


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": lambda: pytest.importorskip("uvloop").new_event_loop()}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_worker_that_dies_while_it_is_idle_is_replaced_before_the_next_question(loop: str):
    async def score() -> float:
        async with WorkerPool(1) as pool:
            process = pool._workers[0]._process
            assert process is not None
            process.kill()
            await process.wait()
            return await ask(pool, "length", "four")

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(score()) == 4.0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_question_to_a_worker_that_is_dead_already_is_a_failure_of_the_worker(loop: str):
    async def question() -> None:
        worker = _Worker(["0"])
        await worker.start()
        process = worker._process
        assert process is not None
        process.kill()
        await process.wait()
        with pytest.raises((OSError, EOFError)):
            await worker.ask(b"", 30)
        assert worker._process is None

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(question())


async def test_the_wait_for_a_worker_is_bounded():
    async with WorkerPool(1, wait_seconds=0.2) as pool:
        busy = asyncio.create_task(ask(pool, "hangs", "hang"))
        while not pool._idle.empty():  # noqa: ASYNC110 - nothing tells that a worker is busy
            await asyncio.sleep(0)
        with pytest.raises(RewardFailed, match=r"waited 0\.2 s for one of 1 workers"):
            await ask(pool, "length", "four")
        busy.cancel()
        await asyncio.wait([busy])


async def test_what_a_reward_does_in_its_worker_is_its_own_failure_and_disturbs_no_other():
    async with WorkerPool(1) as pool:
        with pytest.raises(RewardFailed, match="the score is nan, not a finite number"):
            await ask(pool, "not_a_number", "a")
        with pytest.raises(RewardFailed, match="the score is str, not a number"):
            await ask(pool, "not_anything", "a")
        printed = [await ask(pool, "prints", "a") for _ in range(2)]
        with pytest.raises(RewardFailed, match="took its worker down"):
            await ask(pool, "answers_for_others", "a")
        value = await ask(pool, "length", "four")

    assert (printed, value) == ([0.25, 0.25], 4.0)


def brevity(episode: Episode) -> float:
    return 1 / len(episode.answer)


async def test_an_external_scorer_is_asked_by_name():
    async with serving(RewardServicer(brevity).register) as address:
        rewards = config({"name": "judge", "weight": 2.0}, external={"judge": {"address": address}})
        async with scoring(rewards) as score:
            response = await score(episode("four"))
            with pytest.raises(RewardFailed, match="Reward judge raised ZeroDivisionError"):
                await score(episode(""))

    assert response.reward == 0.5


async def test_an_external_scorer_that_is_away_is_a_failure_with_its_address():
    rewards = config({"name": "judge"}, external={"judge": {"address": "127.0.0.1:9"}}, timeout_seconds=0.5)
    async with scoring(rewards) as score:
        with pytest.raises(RewardFailed, match=r"External reward judge at 127\.0\.0\.1:9"):
            await score(episode("a"))


async def test_no_worker_is_started_where_none_is_needed():
    async with open_gateway(config({"name": "exact"}, {"name": f"{OWN}:patient"})):
        started = [child for child in psutil.Process().children() if "reward_gateway.worker" in child.cmdline()]

    assert started == []


def test_the_gateway_itself_imports_nothing_heavy():
    heavy = {"sympy", "math_verify", "jsonschema", "langdetect", "openai", "reasoning_gym", "torch", "transformers"}
    code = f"import sys, reward_gateway.wiring, reward_gateway.__main__\nassert not {heavy} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[reward_gateway.domains.d]\nrewards = [{ name = "exat" }]', "Did you mean 'exact'?"),
        ("[reward_gateway.domains.d]\nrewards = []", "at least 1 item"),
        ("[reward_gateway]\nworker = 3", "Did you mean 'workers'?"),
    ],
)
def test_a_wrong_file_ends_the_process_with_status_2_and_a_remedy(tmp_path, toml: str, message: str):
    farm = tmp_path / "farm.toml"
    farm.write_text(toml)

    ended = subprocess.run([sys.executable, "-m", "reward_gateway", str(farm)], capture_output=True, text=True)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr


async def test_the_process_serves_scores_and_drains_on_sigterm(tmp_path):
    farm = tmp_path / "farm.toml"
    farm.write_text('[reward_gateway.domains.d]\nrewards = [{ name = "maths" }]')
    command = [sys.executable, "-m", "reward_gateway", str(farm), "--reward_gateway.listen.port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    line = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
    address = re.search(r"127\.0\.0\.1:\d+", line)
    assert address, line
    assert await rpc.is_serving(address[0], timeout=10)

    process.terminate()

    assert await asyncio.wait_for(process.wait(), 15) == 0
