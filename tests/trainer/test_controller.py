"""The loop against a real sample_buffer process, with players in place of env_managers and no engines."""

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.run import DomainConfig, ModelConfig, RunConfig, SamplingConfig
from rollfarm.v1 import llm_proxy_pb2_grpc, sample_buffer_pb2, sample_buffer_pb2_grpc, trainer_pb2
from tests.trainer.stand_ins import play_forever, serving_proxy
from tests.trainer.test_ranks import free_port
from trainer.checkpoints import Checkpoints
from trainer.config import TrainerConfig, TrainerRoot
from trainer.controller import Controller
from trainer.controls import Controls
from trainer.farm import SampleBuffer
from trainer.learner import build_learner
from trainer.progress import Progress
from trainer.weights.gloo import Links
from trainer.weights.publisher import Publisher

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def buffer_address() -> Iterator[str]:
    """`python -m sample_buffer` with its journal in memory; each test has a run of its own in it."""
    address = f"127.0.0.1:{free_port()}"
    flags = ["--sample_buffer.listen.port", address.split(":")[1], "--sample_buffer.journal", "memory"]
    process = subprocess.Popen([sys.executable, "-m", "sample_buffer", *flags], cwd=ROOT, stdin=subprocess.DEVNULL)
    end = time.monotonic() + START_SECONDS
    while not asyncio.run(rpc.is_serving(address, timeout=1)):
        assert process.poll() is None
        assert time.monotonic() < end
    yield address
    process.kill()
    process.wait()


@dataclass(frozen=True)
class Trainer:
    """One life of a trainer."""

    controller: Controller
    progress: Progress
    controls: Controls
    publisher: Publisher

    async def until(self, condition: Callable[[Progress], bool]) -> None:
        reached = await self.progress.changed.first(lambda: condition(self.progress) or None, 60)
        assert reached


@dataclass(frozen=True)
class Farm:
    """What outlives a trainer."""

    root: TrainerRoot
    buffer: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub"
    proxy: "llm_proxy_pb2_grpc.LlmProxyServiceAsyncStub"
    proxy_address: str

    def with_run(self, **changes: object) -> "Farm":
        return replace(self, root=self.root.model_copy(update={"run": self.root.run.model_copy(update=changes)}))

    def trainer(self) -> Trainer:
        run = self.root.run
        progress, controls = Progress(run.name, run.steps, run.path / "metrics.jsonl"), Controls()
        links = Links(host="127.0.0.1", port=0, timeout_seconds=5)
        publisher = Publisher(self.proxy, links, mode="keep", transfer_timeout_seconds=5)
        controller = Controller(
            self.root,
            lambda: build_learner(self.root),
            SampleBuffer(self.buffer, run_id=run.name, trainer_id="trainer"),
            publisher,
            Checkpoints(run.path / "checkpoints", run_id=run.name, keep=2),
            progress,
            controls,
        )
        return Trainer(controller, progress, controls, publisher)

    async def status(self) -> sample_buffer_pb2.GetStatusResponse:
        request = sample_buffer_pb2.GetStatusRequest(run_id=self.root.run.name)
        return await rpc.call(self.buffer.GetStatus, request, timeout=10)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.root.run.path / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["kind"] == kind]

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.root.run.path / "model" / "model.safetensors")


@asynccontextmanager
async def farm(
    address: str, model: Path, folder: Path, *, alpha: float = 1.0, **settings: object
) -> AsyncIterator[Farm]:
    """A run of six steps of two groups of four, being played."""
    run = RunConfig(
        name=f"run-{uuid.uuid4().hex[:8]}",
        folder=folder,
        steps=6,
        alpha=alpha,
        batch_groups=2,
        group_size=4,
        domains=[DomainConfig(name="lake", environment="frozen_lake")],
        sampling=SamplingConfig(max_tokens=2),
    )
    trainer = {"lr": 1e-2, "device": "cpu", "checkpoint_every": 2, "validation_episodes": 4, "exit_when_finished": True}
    root = TrainerRoot(
        run=run, model=ModelConfig(path=str(model)), trainer=TrainerConfig.model_validate({**trainer, **settings})
    )
    async with serving_proxy() as proxy, rpc.channel(address) as to_buffer, rpc.channel(proxy.address) as to_proxy:
        playing = asyncio.create_task(play_forever(address))
        try:
            yield Farm(
                root,
                sample_buffer_pb2_grpc.SampleBufferServiceStub(to_buffer),
                llm_proxy_pb2_grpc.LlmProxyServiceStub(to_proxy),
                proxy.address,
            )
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


async def test_a_run_goes_from_first_publication_to_final_export(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path) as run:
        trainer = run.trainer()
        await trainer.controller.run()

        status = await run.status()
        assert (status.policy_version, status.next_commit_step) == (7, 6)
        assert status.committed_trajectory_count == 6 * 8
        assert status.max_staleness <= 1
        assert trainer.progress.phase == trainer_pb2.PHASE_FINISHED
        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        assert [(line["step_count"], line["episode_count"]) for line in run.metrics("validation")] == [(0, 4), (6, 4)]
        assert run.weights()


async def test_alpha_0_trains_on_nothing_but_the_newest_version(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, alpha=0.0) as run:
        await run.trainer().controller.run()

        status = await run.status()
        assert dict(status.staleness_counts) == {0: 48}
        assert [line["metrics"]["staleness_max"] for line in run.metrics("step")] == [0] * 6


async def test_a_crash_repeats_uncommitted_batches_in_silence_and_changes_nothing(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 4, "validation_episodes": 0}
    async with farm(buffer_address, model_path, tmp_path / "straight", **settings) as straight:
        await straight.trainer().controller.run()
    async with farm(buffer_address, model_path, tmp_path / "crashed", **settings) as run:
        first = run.trainer()
        dying = asyncio.create_task(first.controller.run())
        await first.until(lambda progress: progress.step_count >= 3)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        before = await run.status()

        second = run.trainer()
        await second.controller.run()

        after = await run.status()
        repeated = before.next_batch_step
        versions = [line["policy_version"] for line in run.metrics("step")]
        assert before.next_commit_step == 0 < repeated
        assert versions[: repeated - 1] == [before.policy_version] * (repeated - 1)
        assert versions[repeated - 1 :] == [before.policy_version + 1 + each for each in range(6 - repeated + 1)]
        assert after.policy_version == versions[-1]
        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        assert (after.next_commit_step, after.committed_trajectory_count) == (6, 48)
        for name, tensor in straight.weights().items():
            assert torch.equal(run.weights()[name], tensor), name


async def test_a_trainer_asked_to_stop_saves_and_the_next_one_repeats_nothing(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, checkpoint_every=100) as run:
        first = run.trainer()
        stopping = asyncio.create_task(first.controller.run())
        await first.until(lambda progress: progress.step_count >= 2)
        first.controls.drain()
        await stopping
        held = first.progress.step_count
        status = await run.status()
        assert status.next_commit_step == held

        second = run.trainer()
        await second.controller.run()

        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        assert (await run.status()).next_commit_step == 6
        assert len({line["policy_version"] for line in run.metrics("step")}) == 6


async def test_a_pause_holds_the_next_step_and_a_checkpoint_can_be_had_meanwhile(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, checkpoint_every=100) as run:
        trainer = run.trainer()
        running = asyncio.create_task(trainer.controller.run())
        await trainer.until(lambda progress: progress.step_count >= 1)

        trainer.controls.pause(True)
        path, steps = await trainer.controls.checkpoint()

        assert path.name == f"step-{steps:06d}"
        assert (await run.status()).next_commit_step == steps
        assert trainer.progress.step_count == steps < 6
        trainer.controls.pause(False)
        await running
        assert trainer.progress.step_count == 6


async def test_a_finished_run_is_found_finished_and_more_steps_go_on(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, validation_episodes=0) as run:
        await run.trainer().controller.run()
        again = run.trainer()
        await again.controller.run()
        assert again.progress.phase == trainer_pb2.PHASE_FINISHED

        longer = run.with_run(steps=8)
        await longer.trainer().controller.run()

        assert [line["step"] for line in run.metrics("step")] == list(range(8))


async def test_a_checkpoint_that_the_journal_does_not_know_is_refused(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path) as run:
        await run.trainer().controller.run()

        forgotten = run.with_run(name="forgotten")
        (run.root.run.path / "checkpoints").rename(_made(forgotten.root.run.path) / "checkpoints")
        with pytest.raises(ConfigError, match="belongs to the run"):
            await forgotten.trainer().controller.run()

        for state in (forgotten.root.run.path / "checkpoints").glob("*/state.json"):
            state.write_text(state.read_text().replace(run.root.run.name, "forgotten"))
        with pytest.raises(ConfigError, match="its journal was lost"):
            await forgotten.trainer().controller.run()


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
