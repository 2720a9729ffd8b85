"""The embedded engine: a transformers model in this process, batched continuously in a thread of its own."""

import asyncio
from collections.abc import Sequence

import torch

from llm_proxy.engine.adapters import Deliver, EngineStatus, UpdateMode
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.receiver import Receiver, Staged
from llm_proxy.engine.requests import Limits, Request
from llm_proxy.engine.runner import Runner, choose_device, load_model
from llm_proxy.engine.stepping import Engine, Update, into
from rollfarm.run import ModelConfig
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2


class EmbeddedAdapter:
    """Runs `Engine` in a thread, and receives weights beside it."""

    name = "embedded"
    limits: Limits

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._engine: Engine
        self._receiver: Receiver
        self._ended: asyncio.Future[None]

    async def start(self, deliver: Deliver) -> None:
        runner = await asyncio.to_thread(self._load)
        self.limits = runner.limits
        self._receiver = Receiver(runner.parameters(), seconds=self._config.weights_seconds, model=self._model)
        self._engine = Engine(runner, deliver=into(asyncio.get_running_loop(), deliver))
        self._ended = in_thread(self._run)

    def _load(self) -> Runner:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        return Runner(
            load_model(self._model, choose_device(self._config.device)),
            slots=self._config.slots,
            context_tokens=self._config.context_tokens,
            kv_cache_bytes=self._config.kv_cache,
        )

    def _run(self) -> None:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        self._engine.run()

    async def watch(self) -> None:
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self._engine.send(self._engine.stop)
        await asyncio.wait([self._ended])

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.send(lambda: self._engine.submit(requests))

    def cancel(self, keys: Sequence[str]) -> None:
        self._engine.send(lambda: self._engine.cancel(keys))

    async def pause(self) -> None:
        await self._engine.ask(lambda: self._engine.set_paused(True))

    async def resume(self) -> None:
        await self._engine.ask(lambda: self._engine.set_paused(False))

    async def join_weights(self, group: engine_pb2.WeightGroup) -> None:
        await self._receiver.join(group)

    async def stage_weights(self, request: engine_pb2.StageWeightsRequest) -> int:
        return await self._receiver.stage(request)

    async def apply_weights(self, policy_version: int, mode: UpdateMode) -> float:
        async def load(staged: Staged) -> float:
            update = Update(staged, mode)
            self._engine.send(lambda: self._engine.update(update))
            return await asyncio.wrap_future(update.done)

        return await self._receiver.apply(policy_version, load)

    async def discard_weights(self, policy_version: int) -> None:
        self._receiver.discard(policy_version)

    async def sleep(self, *, discard_weights: bool) -> None:
        async def rest() -> None:
            await self._engine.ask(lambda: self._engine.sleep(discard_weights=discard_weights))

        await self._receiver.sleep(rest, discard_weights=discard_weights)

    async def wake_up(self) -> None:
        await self._engine.ask(self._engine.wake_up)

    async def check(self) -> None:
        """Lives in this process: there is nobody to ask."""

    def status(self) -> EngineStatus:
        return self._engine.status
