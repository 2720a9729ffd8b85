"""Slow, broken and unwanted episodes: what they cost is theirs alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from env_manager.config import EnvManagerConfig
from env_manager.heartbeats import Heartbeats
from env_manager.rendering import Renderer
from env_manager.wiring import open_worker
from rollfarm import rpc
from rollfarm.env import Action, Environment, Step
from rollfarm.run import DomainConfig, RunConfig
from rollfarm.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    reward_gateway_pb2,
    sample_buffer_pb2,
    trajectory_pb2,
)
from sample_buffer.config import SampleBufferConfig
from sample_buffer.journal import MemoryJournal
from sample_buffer.ledger import Ledger
from sample_buffer.server import SampleBufferServicer
from tests.env_manager.fakes import FakeBuffer, FakeProxy, FakeRewards, episode, serving, tokenizer, working
from tests.env_manager.hosting import running

TOKENIZER = tokenizer()
HERE = "tests.env_manager.test_robustness"


def left(prompt: object, asked: object) -> list[int]:
    return TOKENIZER.encode("left")


class Broken(Environment):
    """Fails while it is told to."""

    runs = "loop"
    fails = True

    def reset(self, seed: int, index: int) -> str:
        if self.fails:
            raise RuntimeError("the simulator is gone")
        return "left"

    def step(self, action: Action) -> Step:
        return Step("", reward=1.0, done=True)


class Sound(Broken):
    """Does not fail."""

    fails = False


async def all_of(loops: Iterable[Callable[[], Awaitable[None]]]) -> None:
    async def run(loop: Callable[[], Awaitable[None]]) -> None:
        await loop()

    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(run(loop))


class Shaky(Sound):
    """Fails at the reset for three seeds in ten."""

    def reset(self, seed: int, index: int) -> str:
        if seed % 10 < 3:
            raise RuntimeError("the simulator stumbled")
        return "left"


BROKEN, SOUND, SHAKY = f"{HERE}:Broken", f"{HERE}:Sound", f"{HERE}:Shaky"


@asynccontextmanager
async def ledger_of(**settings: object) -> AsyncIterator[tuple[Ledger, str]]:
    """A real sample_buffer that has a run of the sound environment, and its address."""
    ledger = Ledger(SampleBufferConfig(), MemoryJournal())
    await ledger.open()
    domains = [DomainConfig(name="play", environment=SOUND, weight=1.0)]
    spec = RunConfig.model_validate({"name": "run", "domains": domains, "batch_groups": 1, **settings}).to_proto()
    ledger.execute(lambda runs: runs.configure("request", "trainer", spec, "nonce", ledger.now()))
    servicer = SampleBufferServicer(ledger, asyncio.Event(), max_trajectory_bytes=100_000)
    async with running(ledger.run), running(ledger.tick), serving(servicer.register) as address:
        yield ledger, address


async def test_losers_and_their_generations_are_cancelled_within_a_second():
    winners = iter(range(2))
    proxy = FakeProxy(lambda prompt, asked: left(prompt, asked) if next(winners, None) is not None else None)
    async with (
        ledger_of(group_size=2, redundant_members=2, alpha=0.0, lease_seconds=60) as (ledger, buffer_address),
        serving(proxy.register) as proxy_address,
        serving(FakeRewards().register) as reward_address,
    ):
        config = EnvManagerConfig(
            sample_buffer_address=buffer_address,
            llm_proxy_address=proxy_address,
            reward_gateway_address=reward_address,
            worker_id="worker-1",
        )
        async with open_worker(config, Renderer(TOKENIZER), 512) as worker:
            loop, state = asyncio.get_running_loop(), ledger.runs.run("").state
            async with running(lambda: all_of(worker.loops)):
                assert await ledger.changed.first(lambda: state.finished_count == 2 or None, 20)
                won = loop.time()
                await proxy.until(lambda: len(proxy.cancelled) == 2)
                late = loop.time() - won

    assert late < 1.0
    assert not state.leases


async def test_leases_taken_while_a_heartbeat_waits_are_heard_of_too():
    buffer, proxy = FakeBuffer(lease_seconds=600), FakeProxy(lambda prompt, asked: None)
    buffer.add(episode(SOUND))
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.until(lambda: len(buffer.beats) == 1)
        buffer.add(episode(SOUND, member=1))
        await proxy.until(lambda: len(proxy.requests) == 2)
        buffer.cancel("lease-1")
        await proxy.until(lambda: proxy.cancelled == ["lease-1/0"])

    assert [list(beat.lease_ids) for beat in buffer.beats[:2]] == [["lease-0"], ["lease-0", "lease-1"]]


class SlowBuffer:
    """Hears of a heartbeat a while after it was sent."""

    def __init__(self) -> None:
        self.heard = 0

    async def Heartbeat(self, request: sample_buffer_pb2.HeartbeatRequest, **_: object):
        await asyncio.sleep(0.01)
        self.heard += 1
        await asyncio.sleep(request.wait_duration.ToNanoseconds() / 1e9)
        return sample_buffer_pb2.HeartbeatResponse()


async def test_heartbeats_arrive_however_fast_leases_are_taken():
    lease = sample_buffer_pb2.EpisodeLease(lease_id="lease-0")
    lease.lease_duration.FromSeconds(6)
    buffer = SlowBuffer()
    heartbeats = Heartbeats(buffer, {"lease-0": lease}, lambda _: None, worker_id="worker-1")

    async with running(heartbeats.run), asyncio.timeout(10):
        while buffer.heard < 4:
            heartbeats.taken()
            await asyncio.sleep(0.001)


async def test_a_heartbeat_that_nothing_interrupts_waits_for_a_third_of_the_lease():
    buffer, proxy = FakeBuffer(lease_seconds=30), FakeProxy(lambda prompt, asked: None)
    buffer.add(episode(SOUND))
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.until(lambda: len(buffer.beats) == 1)

    assert 9.5 < buffer.beats[0].wait_duration.ToNanoseconds() / 1e9 <= 10


async def test_an_environment_that_only_fails_is_left_alone_while_others_play_on():
    buffer, proxy = FakeBuffer(), FakeProxy(left)
    buffer.add(*[episode(BROKEN, member=member) for member in range(4)])
    async with serving(proxy.register) as address, working(buffer, address, suspend_failures=4, suspend_seconds=600):
        await buffer.ended(4)
        await buffer.until(lambda: list(buffer.asked[-1].excluded_environments) == [BROKEN])
        buffer.add(episode(BROKEN), *[episode(SOUND, member=member) for member in range(3)])
        await buffer.ended(7)

    assert (len(buffer.failed), len(buffer.completed)) == (4, 3)
    assert [one.task.environment for one in buffer.pending] == [BROKEN]


async def test_an_environment_that_fails_three_of_ten_at_once_is_not_left_alone_while_the_others_play():
    buffer, proxy = FakeBuffer(), FakeProxy(lambda prompt, asked: None)
    buffer.add(*[episode(SHAKY, seed=seed) for seed in range(100)])
    async with serving(proxy.register) as address, working(buffer, address, slots=100):
        await buffer.ended(30)
        buffer.add(episode(SHAKY, seed=9))
        await proxy.until(lambda: len(proxy.requests) == 71)

    assert not any(asked.excluded_environments for asked in buffer.asked)


async def test_a_suspended_environment_is_tried_one_episode_at_a_time_until_it_is_well(monkeypatch):
    monkeypatch.setattr("env_manager.worker.REST_SECONDS", 0.0)
    buffer, proxy = FakeBuffer(), FakeProxy(left)
    buffer.add(*[episode(BROKEN, member=member) for member in range(12)])
    settings = {"suspend_failures": 4, "suspend_seconds": 0.01, "most_suspend_seconds": 0.05, "slots": 4}
    async with serving(proxy.register) as address, working(buffer, address, **settings):
        await buffer.ended(8)
        probes = [asked for asked in buffer.asked if asked.environments]
        monkeypatch.setattr(Broken, "fails", False)
        await buffer.ended(12)

    assert {(asked.max_leases, *asked.environments) for asked in probes} == {(1, BROKEN)}
    assert len(buffer.failed) + len(buffer.completed) == 12
    assert len(buffer.completed) >= 3


async def test_failures_of_generation_and_reward_are_not_held_against_the_environment():
    buffer, proxy = FakeBuffer(), FakeProxy(lambda prompt, asked: [])
    buffer.add(*[episode(SOUND, member=member) for member in range(4)])
    async with serving(proxy.register) as address, working(buffer, address, suspend_failures=1):
        await buffer.ended(4)
        await buffer.until(lambda: not buffer.asked[-1].excluded_environments and len(buffer.asked) > 1)

    assert {failed.outcome for failed in buffer.failed.values()} == {trajectory_pb2.OUTCOME_ABORTED}
    assert not any(asked.excluded_environments for asked in buffer.asked)


class WaitingRewards(FakeRewards):
    """Scores nothing before it has been asked for so many episodes, as a reward does that compares siblings."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._all_here = asyncio.Event()
        self._count = count

    async def Score(
        self, request: reward_gateway_pb2.ScoreRequest, context: object
    ) -> reward_gateway_pb2.ScoreResponse:
        answer = await super().Score(request, context)
        if len(self.asked) == self._count:
            self._all_here.set()
        await self._all_here.wait()
        return answer


async def test_scoring_takes_no_slot_so_that_siblings_can_be_played_that_it_waits_for():
    buffer, proxy, rewards = FakeBuffer(), FakeProxy(left), WaitingRewards(6)
    buffer.add(*[episode(SOUND, member=member) for member in range(6)])
    async with serving(proxy.register) as address, working(buffer, address, rewards, slots=1):
        await buffer.ended(6)

    assert len(buffer.completed) == 6


async def test_what_an_environment_played_to_the_end_speaks_for_it_before_it_is_scored():
    buffer, proxy, rewards = FakeBuffer(), FakeProxy(left), WaitingRewards(21)
    buffer.add(*[episode(SHAKY, seed=seed) for seed in [9] * 20 + [1] * 16 + [9]])
    async with serving(proxy.register) as address, working(buffer, address, rewards, slots=20):
        await buffer.ended(37)

    assert (len(buffer.completed), len(buffer.failed)) == (21, 16)
    assert not any(asked.excluded_environments for asked in buffer.asked)


async def test_the_status_tells_of_every_environment_and_why_the_latest_episode_failed():
    buffer, proxy = FakeBuffer(), FakeProxy(left)
    buffer.add(episode(BROKEN), episode(BROKEN, member=1), episode(SOUND))
    async with (
        serving(proxy.register) as proxy_address,
        serving(buffer.register) as buffer_address,
        serving(FakeRewards().register) as reward_address,
    ):
        config = EnvManagerConfig(
            sample_buffer_address=buffer_address,
            llm_proxy_address=proxy_address,
            reward_gateway_address=reward_address,
            worker_id="worker-1",
            slots=8,
            suspend_failures=2,
            suspend_share=0.5,
        )
        async with (
            open_worker(config, Renderer(TOKENIZER), 512) as worker,
            running(lambda: all_of(worker.loops)),
            serving(worker.servicer.register) as address,
            rpc.channel(address) as channel,
        ):
            await buffer.ended(3)
            stub = environment_pb2_grpc.EnvManagerServiceStub(channel)
            asked = environment_pb2.EnvManagerServiceGetStatusRequest()
            status = await rpc.call(stub.GetStatus, asked, timeout=5)

    of = {one.name: one for one in status.environments}
    assert (status.worker_id, status.slot_count) == ("worker-1", 8)
    assert (dict(of[BROKEN].ended_count_by_outcome), of[BROKEN].suspended) == ({"OUTCOME_ENV_FAILED": 2}, True)
    assert "the simulator is gone" in of[BROKEN].detail
    assert (dict(of[SOUND].ended_count_by_outcome), of[SOUND].suspended) == ({"OUTCOME_OK": 1}, False)
    assert not of["frozen_lake"].ended_count_by_outcome
