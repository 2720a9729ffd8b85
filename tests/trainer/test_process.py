"""`python -m trainer` as it is run: killed, restarted, asked to stop, in one rank and in two."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollfarm import rpc
from rollfarm.config import EXIT_BAD_CONFIG
from rollfarm.ports import free_port
from rollfarm.v1 import trainer_pb2, trainer_pb2_grpc
from tests.trainer.conftest import ROOT
from tests.trainer.farms import Farm, farm

STEPS = 200
"""So many that a trainer is still at work when a test looks at it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Process:
    """A trainer, of one or several ranks."""

    def __init__(self, run: Farm, buffer: str, proxy: str, *, ranks: int = 1) -> None:
        settings, port, meeting = run.root, free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        flags = {
            "run.name": settings.run.name,
            "run.folder": settings.run.folder,
            "run.steps": settings.run.steps,
            "run.batch_groups": settings.run.batch_groups,
            "run.group_size": settings.run.group_size,
            "run.domains": json.dumps([{"name": "lake", "environment": "frozen_lake"}]),
            "run.sampling.max_tokens": settings.run.sampling.max_tokens,
            "model.path": settings.model.path,
            "trainer.sample_buffer_address": buffer,
            "trainer.llm_proxy_address": proxy,
            "trainer.lr": settings.trainer.lr,
            "trainer.checkpoint_every": settings.trainer.checkpoint_every,
            "trainer.validation_episodes": settings.trainer.validation_episodes,
            "trainer.exit_when_finished": settings.trainer.exit_when_finished,
        }
        self.ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "trainer",
                    *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
                    *("--trainer.listen.port", str(0 if rank else port)),
                ],
                cwd=ROOT,
                env={**os.environ, **_rendezvous(rank, ranks, meeting)},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]

    async def until_step(self, step: int) -> trainer_pb2.GetProgressResponse:
        """Wait until that many steps are done; every step publishes one version after the first."""
        async with rpc.channel(self.address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            version = 0
            while True:
                progress = await rpc.call(stub.GetProgress, trainer_pb2.GetProgressRequest(), timeout=20)
                if progress.step_count >= step:
                    return progress
                wait = trainer_pb2.WaitForVersionRequest(after_version=version)
                version = (await rpc.call(stub.WaitForVersion, wait, timeout=20)).policy_version

    async def exits(self) -> list[int]:
        return [await asyncio.to_thread(rank.wait, 120) for rank in self.ranks]

    def signal(self, number: int, rank: int = 0) -> None:
        self.ranks[rank].send_signal(number)


def _rendezvous(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


async def test_killed_at_any_step_it_goes_on_by_itself_and_stops_when_asked(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, validation_episodes=0) as run:
        run = run.with_run(steps=STEPS)
        proxy = run.proxy_address
        first = Process(run, buffer_address, proxy)
        before = await first.until_step(7)
        first.signal(signal.SIGKILL)
        await first.exits()

        second = Process(run, buffer_address, proxy)
        after = await second.until_step(20)
        assert after.policy_version > before.policy_version
        second.signal(signal.SIGTERM)
        assert await second.exits() == [0]

        third = Process(run, buffer_address, proxy)
        assert await third.exits() == [0]
        assert [line["step"] for line in run.metrics("step")] == list(range(STEPS))
        assert (await run.status()).next_commit_step == STEPS


async def test_a_second_trainer_takes_the_run_over_at_once_and_the_first_one_ends(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, validation_episodes=0) as run:
        run = run.with_run(steps=STEPS)
        first = Process(run, buffer_address, run.proxy_address)
        await first.until_step(3)
        first.signal(signal.SIGSTOP)  # or it would be done before the second has imported torch

        second = Process(run, buffer_address, run.proxy_address)
        await second.until_step(5)
        first.signal(signal.SIGCONT)

        assert await first.exits() == [EXIT_BAD_CONFIG]
        assert await second.exits() == [0]
        assert [line["step"] for line in run.metrics("step")] == list(range(STEPS))
        assert (await run.status()).next_commit_step == STEPS


async def test_two_ranks_go_down_together_and_go_on_together(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, validation_episodes=0) as run:
        run = run.with_run(steps=STEPS)
        proxy = run.proxy_address
        first = Process(run, buffer_address, proxy, ranks=2)
        await first.until_step(5)
        first.signal(signal.SIGKILL, rank=1)
        codes = await first.exits()
        assert codes[0] not in (0, None)

        second = Process(run, buffer_address, proxy, ranks=2)
        assert await second.exits() == [0, 0]
        assert [line["step"] for line in run.metrics("step")] == list(range(STEPS))
        assert (await run.status()).next_commit_step == STEPS
