"""A farm for the trainer: a real sample_buffer, players in place of env_managers, and no engines."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollfarm import rpc
from rollfarm.run import DomainConfig, ModelConfig, RunConfig, SamplingConfig
from rollfarm.v1 import llm_proxy_pb2_grpc, sample_buffer_pb2, sample_buffer_pb2_grpc
from tests.trainer.stand_ins import evenly, play_forever, serving_proxy
from trainer.buffer import BufferClient
from trainer.checkpoints import Checkpoints
from trainer.colocation import Turns
from trainer.config import TrainerConfig, TrainerRoot
from trainer.controller import Controller
from trainer.controls import Controls
from trainer.learner import build_learner
from trainer.progress import Progress
from trainer.weights.groups import Links
from trainer.weights.publisher import Publisher


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

    def trainer(self, *, keep: int = 2, keep_best: int = 0, turns: Turns | None = None) -> Trainer:
        run = self.root.run
        progress, controls = Progress(run.name, run.steps, run.path / "metrics.jsonl"), Controls()
        links = Links(host="127.0.0.1", port=0, timeout_seconds=5)
        publisher = Publisher(self.proxy, links, mode="keep", transfer_timeout_seconds=5)
        controller = Controller(
            self.root,
            lambda: build_learner(self.root),
            BufferClient(self.buffer, run_id=run.name, trainer_id=uuid.uuid4().hex),
            publisher,
            Checkpoints(run.path / "checkpoints", run_id=run.name, keep=keep, keep_best=keep_best),
            progress,
            controls,
            turns,
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
    address: str,
    model: Path,
    folder: Path,
    *,
    alpha: float = 1.0,
    pay: Callable[[sample_buffer_pb2.Episode], float] = evenly,
    **settings: object,
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
        playing = asyncio.create_task(play_forever(address, pay))
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
