import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from grpc import aio

from rollfarm import rpc
from rollfarm.errors import Unsupported
from rollfarm.service import ErrorInterceptor
from rollfarm.v1 import trainer_pb2 as pb
from rollfarm.v1 import trainer_pb2_grpc
from tests.trainer.test_progress import step
from trainer.controls import Controls
from trainer.progress import Progress
from trainer.server import TrainerServicer


class Served:
    """A trainer's front door with nobody behind it."""

    def __init__(self, folder: Path) -> None:
        self.progress = Progress("run", 10, folder / "metrics.jsonl")
        self.controls = Controls()


Stub: TypeAlias = "trainer_pb2_grpc.TrainerServiceAsyncStub"
Door: TypeAlias = tuple[Served, Stub]


@asynccontextmanager
async def serving(servicer: TrainerServicer) -> AsyncIterator[Stub]:
    server = aio.server(interceptors=[ErrorInterceptor()])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel)
    await server.stop(grace=None)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Door]:
    behind = Served(tmp_path)
    async with serving(TrainerServicer(behind.progress, behind.controls)) as stub:
        yield behind, stub


async def test_progress_is_told_from_a_step_on(served: Door) -> None:
    behind, stub = served
    for number in range(3):
        behind.progress.stepped(step(number))

    answer = await rpc.call(stub.GetProgress, pb.GetProgressRequest(from_step=0), timeout=5)

    assert [each.step for each in answer.steps] == [0, 1, 2]
    assert (answer.step_count, answer.total_step_count) == (3, 10)


async def test_waiting_for_a_version_ends_when_it_comes_or_just_before_the_deadline(served: Door) -> None:
    behind, stub = served
    waiting = asyncio.ensure_future(rpc.call(stub.WaitForVersion, pb.WaitForVersionRequest(after_version=3), timeout=5))
    behind.progress.published(4)

    assert (await waiting).policy_version == 4
    in_vain = await rpc.call(stub.WaitForVersion, pb.WaitForVersionRequest(after_version=4), timeout=0.4)
    assert in_vain.policy_version == 4


async def test_pause_and_resume_reach_the_controls(served: Door) -> None:
    behind, stub = served

    await rpc.call(stub.Pause, pb.TrainerServicePauseRequest(), timeout=5)
    assert behind.controls.paused
    await rpc.call(stub.Resume, pb.TrainerServiceResumeRequest(), timeout=5)
    assert not behind.controls.paused


async def test_a_checkpoint_is_answered_once_it_is_committed(served: Door) -> None:
    behind, stub = served
    asking = asyncio.ensure_future(rpc.call(stub.Checkpoint, pb.CheckpointRequest(), timeout=5))

    await behind.controls.until_wanted()
    behind.controls.checkpointed(Path("checkpoints/step-000007"), 7)

    answer = await asking
    assert (answer.path, answer.step_count) == ("checkpoints/step-000007", 7)


async def test_where_nothing_is_learnt_nothing_can_be_paused_or_saved(tmp_path: Path) -> None:
    asked = {
        "Pause": pb.TrainerServicePauseRequest(),
        "Resume": pb.TrainerServiceResumeRequest(),
        "Checkpoint": pb.CheckpointRequest(),
    }

    async with serving(TrainerServicer(Progress("run", 10, tmp_path / "metrics.jsonl"), controls=None)) as stub:
        for verb, request in asked.items():
            with pytest.raises(Unsupported, match="Nothing is learnt here"):
                await rpc.call(getattr(stub, verb), request, timeout=5)
