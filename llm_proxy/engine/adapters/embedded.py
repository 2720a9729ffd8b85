"""The embedded engine: a transformers model in this process, batched continuously in a thread of its own."""

import asyncio

import torch

from llm_proxy.engine.adapters import Deliver
from llm_proxy.engine.adapters.threaded import ThreadedAdapter
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.receiver import Receiver
from llm_proxy.engine.runner import Runner, choose_device, load_model
from rollfarm.run import ModelConfig


class EmbeddedAdapter(ThreadedAdapter):
    """Computes with torch; weights are received from the start."""

    name = "embedded"

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._receiver: Receiver

    async def start(self, deliver: Deliver) -> None:
        runner = await asyncio.to_thread(self._load)
        self._receiver = Receiver(runner.parameters(), seconds=self._config.weights_seconds, model=self._model)
        self._begin(runner, deliver)

    def _load(self) -> Runner:
        self._set_threads()
        return Runner(
            load_model(self._model, choose_device(self._config.device)),
            slots=self._config.slots,
            context_tokens=self._config.context_tokens,
            kv_cache_bytes=self._config.kv_cache,
        )

    def _run(self) -> None:
        self._set_threads()
        super()._run()

    def _set_threads(self) -> None:
        """Of torch; each of its threads has a number of its own."""
        if self._config.threads:
            torch.set_num_threads(self._config.threads)

    async def _receiving(self) -> Receiver:
        return self._receiver
