"""The service over gRPC, in this process."""

import asyncio
from collections.abc import AsyncIterator

import prometheus_client
import pytest
from structlog.testing import capture_logs

from rollfarm import rpc, service, times
from rollfarm.config import Listen
from rollfarm.error_wire import from_failure
from rollfarm.errors import (
    InvalidTrajectory,
    StepOutOfOrder,
    TrainerReplaced,
    TrajectoryTooLarge,
    UnknownRun,
    UnknownTrajectory,
    UnknownValidation,
)
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import wire
from sample_buffer.config import SampleBufferConfig
from sample_buffer.journal import MemoryJournal
from sample_buffer.ledger import Ledger
from sample_buffer.metrics import StateCollector
from sample_buffer.server import SERVICE, SampleBufferServicer
from tests.sample_buffer.support import complete_all, lease_all, make_spec, play, request_id, take_batch


class Served:
    """A running service, its ledger and a stub for it."""

    def __init__(self, ledger: Ledger, stop: asyncio.Event, channel: rpc.aio.Channel) -> None:
        self.ledger = ledger
        self.stop = stop
        self.stub = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        self.channel = channel

    async def configure(
        self, *, alpha: float = 1.0, steps: int = 0, trainer: str = "trainer"
    ) -> pb.ConfigureRunResponse:
        request = pb.ConfigureRunRequest(
            request_id=request_id(), trainer_id=trainer, spec=make_spec(alpha=alpha, steps=steps)
        )
        return await rpc.call(self.stub.ConfigureRun, request, timeout=5)

    async def publish(self, version: int, trained: int = 0, *, trainer: str = "trainer") -> pb.PublishVersionResponse:
        request = pb.PublishVersionRequest(
            request_id=request_id(),
            run_id="run",
            trainer_id=trainer,
            policy_version=version,
            trained_step_count=trained,
        )
        return await rpc.call(self.stub.PublishVersion, request, timeout=5)

    async def commit(self, step: int, batch_id: str, *, trainer: str = "trainer") -> pb.CommitStepResponse:
        request = pb.CommitStepRequest(
            request_id=request_id(), run_id="run", trainer_id=trainer, step=step, batch_id=batch_id
        )
        return await rpc.call(self.stub.CommitStep, request, timeout=5)

    async def status(self) -> pb.GetStatusResponse:
        return await rpc.call(self.stub.GetStatus, pb.GetStatusRequest(), timeout=5)

    async def poll_leases(self, seconds: float) -> list[pb.EpisodeLease]:
        request = pb.LeaseEpisodesRequest(request_id=request_id(), worker_id="w", max_leases=100)
        return list((await rpc.call(self.stub.LeaseEpisodes, request, timeout=seconds)).leases)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    ledger = Ledger(SampleBufferConfig(), MemoryJournal())
    await ledger.open()
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    buffer = SampleBufferServicer(ledger, stop, max_trajectory_bytes=20_000)
    loops = (ledger.run, ledger.tick, buffer.wake_on_stop)
    listen = Listen(drain_seconds=30)
    serving = asyncio.create_task(
        service.serve(buffer.register, listen, *loops, services=[SERVICE], stop=stop, started=port.set_result)
    )
    async with rpc.channel(f"127.0.0.1:{await port}") as channel:
        yield Served(ledger, stop, channel)
    stop.set()
    await serving


async def test_a_run_from_its_first_lease_to_its_last_commit(served: Served) -> None:
    created = await served.configure(steps=2, alpha=0.0)
    await served.publish(1)
    for step in range(2):
        await complete_all(served.stub, await lease_all(served.stub))
        (message,) = await take_batch(served.stub, step)
        await served.publish(step + 2, step + 1)
        committed = await served.commit(step, message.batch.batch_id)
        assert (message.last, len(message.groups), committed.next_commit_step) == (True, 2, step + 1)

    status = await served.status()

    assert created.created
    assert (status.policy_version, status.committed_trajectory_count, status.credits_in_use_count) == (3, 8, 0)
    assert dict(status.staleness_counts) == {0: 8}


async def test_a_long_poll_answers_as_soon_as_there_is_work(served: Served) -> None:
    waiting = asyncio.create_task(served.poll_leases(10))
    await served.configure()

    assert len(await waiting) == 8


async def test_a_long_poll_without_work_answers_with_nothing_before_the_deadline(served: Served) -> None:
    await served.configure()
    await lease_all(served.stub)

    assert await served.poll_leases(0.5) == []
    request = pb.LeaseBatchRequest(run_id="run", trainer_id="trainer", step=0)
    assert [message async for message in rpc.stream(served.stub.LeaseBatch, request, timeout=0.5)] == []


async def test_a_batch_is_waited_for(served: Served) -> None:
    await served.configure()
    waiting = asyncio.create_task(take_batch(served.stub, 0))
    await complete_all(served.stub, await lease_all(served.stub))

    (message,) = await waiting

    assert [group.index for group in message.groups] == [0, 1]


async def test_long_polls_end_when_the_service_stops(served: Served) -> None:
    await served.configure()
    await lease_all(served.stub)
    waiting = asyncio.create_task(served.poll_leases(20))
    await served.status()

    served.stop.set()

    async with asyncio.timeout(5):
        assert await waiting == []


async def test_a_trainer_that_another_one_replaced_is_told_so_even_while_it_waits(served: Served) -> None:
    await served.configure(trainer="old")
    waiting = asyncio.create_task(take_batch(served.stub, 0, trainer="old"))
    await served.status()

    found = await served.configure(trainer="new")

    with pytest.raises(TrainerReplaced, match="'new' has taken over run 'run' from 'old'"):
        await waiting
    with pytest.raises(TrainerReplaced):
        await served.publish(1, trainer="old")
    await complete_all(served.stub, await lease_all(served.stub))
    (message,) = await take_batch(served.stub, 0, trainer="new")
    with pytest.raises(TrainerReplaced):
        await served.commit(0, message.batch.batch_id, trainer="old")
    await served.commit(0, message.batch.batch_id, trainer="new")
    assert (found.created, (await served.status()).policy_version) == (False, 0)


async def test_validation_is_waited_for_and_measured(served: Served) -> None:
    await served.configure()
    start = pb.StartValidationRequest(request_id=request_id(), run_id="run", validation_id="v", episode_count=3)
    await rpc.call(served.stub.StartValidation, start, timeout=5)
    wait = pb.WaitValidationRequest(run_id="run", validation_id="v")
    early = await rpc.call(served.stub.WaitValidation, wait, timeout=0.4)
    waiting = asyncio.create_task(rpc.call(served.stub.WaitValidation, wait, timeout=10))
    await complete_all(served.stub, (await lease_all(served.stub))[:3])

    done = await waiting

    assert (early.finished, done.finished) == (False, True)
    assert [(one.episode_count, one.mean_reward) for one in done.results] == [(3, 1.0)]


async def test_a_repeated_call_gets_its_first_answer(served: Served) -> None:
    await served.configure()
    request = pb.LeaseEpisodesRequest(request_id="same", worker_id="w", max_leases=2)

    answers = [await rpc.call(served.stub.LeaseEpisodes, request, timeout=5) for _ in range(2)]

    assert answers[0] == answers[1]
    assert (await served.status()).episode_counts["leased"] == 2


async def test_a_heartbeat_names_the_leases_that_are_gone(served: Served) -> None:
    await served.configure()
    held = await lease_all(served.stub)
    request = pb.HeartbeatRequest(worker_id="worker", lease_ids=[held[0].lease_id, "elsewhere-3"])

    answer = await rpc.call(served.stub.Heartbeat, request, timeout=5)

    assert [one.lease_id for one in answer.cancelled] == ["elsewhere-3"]


def heartbeat(held: list[pb.EpisodeLease], seconds: float) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        worker_id="worker", lease_ids=[one.lease_id for one in held], wait_duration=times.duration(seconds)
    )


async def test_a_heartbeat_that_waits_answers_as_soon_as_a_lease_is_to_be_cancelled(served: Served) -> None:
    await served.configure()
    held = await lease_all(served.stub)
    waiting = asyncio.create_task(rpc.call(served.stub.Heartbeat, heartbeat(held, 30), timeout=40))
    await complete_all(served.stub, held[:1])
    await served.publish(1)
    assert not waiting.done()

    await served.publish(2)

    answer = await asyncio.wait_for(waiting, 5)
    told = [(one.lease_id, one.outcome) for one in answer.cancelled]
    assert told == [(one.lease_id, tp.OUTCOME_STALE) for one in held[1:]]


async def test_a_heartbeat_that_waits_in_vain_says_so_in_time_and_has_extended_its_leases_once(served: Served) -> None:
    await served.configure()
    held = await lease_all(served.stub)
    began = served.ledger.now()

    answer = await rpc.call(served.stub.Heartbeat, heartbeat(held, 0.3), timeout=20)

    ended = served.ledger.now()
    lasting = {end - 30.0 for end in served.ledger.runs.run("").fold.expiry.values()}
    assert len(answer.cancelled) == 0
    assert ended - began >= 0.3
    assert began <= min(lasting) <= max(lasting) <= ended - 0.3


async def test_heartbeats_that_wait_end_when_the_service_stops(served: Served) -> None:
    await served.configure()
    held = await lease_all(served.stub)
    waiting = asyncio.create_task(rpc.call(served.stub.Heartbeat, heartbeat(held, 60), timeout=60))
    await served.status()

    served.stop.set()

    async with asyncio.timeout(5):
        assert not (await waiting).cancelled


async def test_what_a_worker_excludes_it_is_not_given(served: Served) -> None:
    await served.configure()
    request = pb.LeaseEpisodesRequest(request_id=request_id(), worker_id="w", max_leases=1)
    request.excluded_environments.append("sums")
    waiting = asyncio.create_task(rpc.call(served.stub.LeaseEpisodes, request, timeout=0.5))

    assert not (await waiting).leases
    assert len(await lease_all(served.stub)) == 8


async def test_trajectories_and_their_lineage_can_be_read(served: Served) -> None:
    await served.configure()
    await complete_all(served.stub, (await lease_all(served.stub))[:3])
    page = await rpc.call(served.stub.ListTrajectories, pb.ListTrajectoriesRequest(), timeout=5)
    newest = page.trajectories[0]

    story = await rpc.call(served.stub.GetLineage, pb.GetLineageRequest(trajectory_id=newest.trajectory_id), timeout=5)

    assert len(page.trajectories) == 3
    assert story.trajectory == newest
    assert [one.event for one in story.transitions] == ["admitted", "leased", "completed"]


async def test_the_log_names_the_trainer_that_took_a_batch(served: Served) -> None:
    await served.configure()
    await complete_all(served.stub, await lease_all(served.stub))

    with capture_logs() as lines:
        await take_batch(served.stub, 0)

    assert [line["trainer_id"] for line in lines if line["event"] == "batch leased"] == ["trainer"]


async def test_mistakes_come_back_as_their_own_class(served: Served) -> None:
    with pytest.raises(UnknownRun, match="No run is configured"):
        await served.status()
    await served.configure()
    (held, *_) = await lease_all(served.stub)
    spoilt = pb.CompleteEpisodeRequest(
        request_id=request_id(), lease_id=held.lease_id, trajectory=play(held.episode, reward=float("nan"))
    )

    with pytest.raises(InvalidTrajectory, match="Fail the episode"):
        await rpc.call(served.stub.CompleteEpisode, spoilt, timeout=5)
    with pytest.raises(StepOutOfOrder) as refused:
        await take_batch(served.stub, 4)
    with pytest.raises(UnknownValidation):
        await rpc.call(served.stub.WaitValidation, pb.WaitValidationRequest(validation_id="v"), timeout=5)
    with pytest.raises(UnknownTrajectory):
        await rpc.call(served.stub.GetLineage, pb.GetLineageRequest(trajectory_id="t"), timeout=5)
    assert refused.value.facts["next_step"] == "0"


async def test_of_many_episodes_each_is_taken_or_refused_by_itself(served: Served) -> None:
    await served.configure()
    first, second, third, *_ = await lease_all(served.stub)
    spoilt, large = play(second.episode, reward=float("nan")), play(third.episode, tokens=5000)
    request = pb.CompleteEpisodesRequest(
        completions=[
            pb.CompleteEpisodeRequest(request_id=request_id(), lease_id=lease.lease_id, trajectory=trajectory)
            for lease, trajectory in ((first, play(first.episode)), (second, spoilt), (third, large))
        ]
    )

    taken, nan, too_large = (await rpc.call(served.stub.CompleteEpisodes, request, timeout=5)).results
    repeated = (await rpc.call(served.stub.CompleteEpisodes, request, timeout=5)).results

    assert taken.completed.disposition == pb.DISPOSITION_ACCEPTED
    assert isinstance(from_failure(nan.failure), InvalidTrajectory)
    assert isinstance(error := from_failure(too_large.failure), TrajectoryTooLarge)
    assert error.facts["most_bytes"] == "20000"
    assert "max_trajectory_bytes" in str(error)
    assert list(repeated) == [taken, nan, too_large]
    assert (await served.status()).episode_counts == {"pending": 0, "leased": 7, "done": 1}


async def test_a_trajectory_is_kept_byte_for_byte_and_one_that_is_none_is_refused(served: Served) -> None:
    await served.configure()
    first, second, *_ = await lease_all(served.stub)
    whole = play(first.episode)
    head = play(first.episode)
    head.ClearField("turns")
    reordered = tp.Trajectory(turns=whole.turns).SerializeToString() + head.SerializeToString()
    request = wire.COMPLETIONS(
        completions=[
            wire.COMPLETION(request_id=request_id(), lease_id=first.lease_id, trajectory=reordered),
            wire.COMPLETION(request_id=request_id(), lease_id=second.lease_id, trajectory=reordered[:-1]),
        ]
    )
    complete = served.channel.unary_unary(
        f"/{SERVICE}/CompleteEpisodes", response_deserializer=pb.CompleteEpisodesResponse.FromString
    )

    taken, refused = (await rpc.call(complete, request.SerializeToString(), timeout=5)).results

    assert reordered != whole.SerializeToString()
    assert taken.completed.disposition == pb.DISPOSITION_ACCEPTED
    assert served.ledger.payload(first.lease_id) == reordered
    assert isinstance(error := from_failure(refused.failure), InvalidTrajectory)
    assert "is not one on the wire" in str(error)


async def test_metrics_are_read_from_the_state(served: Served) -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(StateCollector(lambda: served.ledger.runs))
    assert prometheus_client.generate_latest(registry) == b""
    await served.configure()
    await complete_all(served.stub, (await lease_all(served.stub))[:5])
    await take_batch(served.stub, 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rollfarm_sample_buffer_{name}", labels)

    assert (value("credits"), value("credits_in_use")) == (4, 4)
    assert (value("groups", state="open"), value("groups", state="taken")) == (2, 2)
    assert (value("episodes", state="leased"), value("episodes", state="done")) == (3, 5)
    assert value("episodes_ended_total", outcome="OUTCOME_OK") == 5
    assert value("trajectories_taken_total", staleness="0") == 4
    assert value("policy_tokens_total") == 15
