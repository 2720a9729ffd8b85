"""Puts the trainer together, in order."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Sequence

import torch
from grpc import aio

from rollfarm import rpc, service
from rollfarm.config import ConfigError, Listen
from rollfarm.errors import TrainerReplaced
from rollfarm.v1 import llm_proxy_pb2_grpc, sample_buffer_pb2_grpc, trainer_pb2_grpc
from trainer import ranks, warm_start
from trainer.backends.build import build_models
from trainer.buffer import BufferClient
from trainer.checkpoints import Checkpoints
from trainer.colocation import Apart, Colocated, Turns
from trainer.config import TrainerConfig, TrainerRoot
from trainer.controller import Controller
from trainer.controls import Controls
from trainer.create_model import ensure_model
from trainer.learner import build_learner, objectives
from trainer.objective import advantage_of
from trainer.progress import Progress
from trainer.server import SERVICE, TrainerServicer
from trainer.tracking import close_all, feeds_of
from trainer.vocabulary import check_vocabularies
from trainer.weights.build import build_transport
from trainer.weights.publisher import Publisher


def check(root: TrainerRoot) -> None:
    """Find what is wrong with the configuration before anything starts. Raises ConfigError."""
    if root.trainer.offline is not None:
        raise ConfigError("trainer.offline: this is a farm's trainer. Say `rollfarm train`, or remove the table.")
    objectives(root.trainer)
    advantage_of(root.trainer)
    if root.trainer.warm_start.data is not None:
        warm_start.load_conversations(root.trainer.warm_start.data)
    if root.trainer.threads:
        torch.set_num_threads(root.trainer.threads)
    ensure_model(root.model)
    check_vocabularies(root.model, root.trainer)


def is_follower() -> bool:
    """Whether this process is a rank other than 0."""
    return ranks.rank() > 0


def follow(root: TrainerRoot) -> None:
    """Do as rank 0 does until it is done."""
    ranks.follow(lambda: build_models(root.model, root.trainer), objectives(root.trainer))


async def serve(root: TrainerRoot) -> None:
    """Serve and learn until the run is over or the trainer is asked to stop."""
    config = root.trainer
    feeds = feeds_of(root)
    progress = Progress(root.run.name, root.run.steps, root.run.path / "metrics.jsonl", feeds)
    controls = Controls()
    asked = service.stop_on_signal()
    async with rpc.channel(config.sample_buffer_address) as buffer, rpc.channel(config.llm_proxy_address) as proxy:
        engines = llm_proxy_pb2_grpc.LlmProxyServiceStub(proxy)
        publisher = _publisher(root, engines)
        turns = _turns(config, engines, controls, publisher)
        controller = _controller(root, buffer, publisher, progress, controls, turns)
        servicer = TrainerServicer(progress, controls)
        try:
            await _run(config.listen, servicer, controller, [publisher.watch, turns.renew], controls, asked)
        except BaseExceptionGroup as group:
            if wrong := _config_error(group):
                raise wrong from None
            raise
        finally:
            await asyncio.to_thread(close_all, feeds)


def _publisher(root: TrainerRoot, engines: llm_proxy_pb2_grpc.LlmProxyServiceAsyncStub) -> Publisher:
    config = root.trainer
    return Publisher(
        engines,
        build_transport(config, root.run.path),
        mode=config.update_mode,
        concurrent_engine_count=config.rolling_engines,
        transfer_timeout_seconds=config.transfer_timeout_seconds,
    )


def _turns(
    config: TrainerConfig,
    engines: llm_proxy_pb2_grpc.LlmProxyServiceAsyncStub,
    controls: Controls,
    publisher: Publisher,
) -> Turns:
    if not config.colocated:
        return Apart()
    drain_seconds = config.transfer_timeout_seconds if config.update_mode == "drain" else 0.0
    return Colocated(engines, controls, publisher.may_catch_up, drain_seconds=drain_seconds)


def _controller(
    root: TrainerRoot,
    buffer: aio.Channel,
    publisher: Publisher,
    progress: Progress,
    controls: Controls,
    turns: Turns,
) -> Controller:
    return Controller(
        root,
        lambda: build_learner(root),
        BufferClient(
            sample_buffer_pb2_grpc.SampleBufferServiceStub(buffer),
            run_id=root.run.name,
            trainer_id=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        ),
        publisher,
        Checkpoints(
            root.run.path / "checkpoints",
            run_id=root.run.name,
            keep=root.trainer.keep_checkpoints,
            keep_best=root.trainer.keep_best,
        ),
        progress,
        controls,
        turns,
    )


async def _run(
    listen: Listen,
    servicer: TrainerServicer,
    controller: Controller,
    besides: Sequence[service.Loop],
    controls: Controls,
    asked: asyncio.Event,
) -> None:
    """Serve while the controller runs, with loops besides; drain where it is asked to stop."""
    stop = asyncio.Event()

    def register(server: aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)

    async def drain_when_asked() -> None:
        await asked.wait()
        controls.drain()

    async def learn() -> None:
        await controller.run()
        stop.set()

    loops = [drain_when_asked, learn, *besides]
    if ranks.world_size() > 1:
        loops.append(lambda: controller.pulse(ranks.PULSE_SECONDS))
    await service.serve(register, listen, *loops, services=[SERVICE], stop=stop)


def _config_error(group: BaseExceptionGroup) -> ConfigError | None:
    """The first wrong setting among what went wrong."""
    for error in group.exceptions:
        found = _config_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, TrainerReplaced):
            return ConfigError(f"run.name: {found}")
        if isinstance(found, ConfigError):
            return found
    return None
