"""An engine that is an unmodified inference server: a child of this host or attached by its URL, spoken to over HTTP.

Requests wait here until the server has a slot, so everything that it holds is running. Weights are received in this
process into memory that the server maps, so generation goes on until the short pause that loads them. A child ends with
this process, however it ends; and this process ends when its server does, attached or not, because another one would
begin with other weights. Every version is loaded under a label that is this host's alone, and every answer says at its
end under which label its tokens were sampled: none is taken for a version that it is not.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from typing import Any, Protocol

import structlog
from torch import Tensor

from llm_proxy.engine.adapters import Deliver, EngineStatus, UpdateMode
from llm_proxy.engine.adapters.admission import Admission, Tasks
from llm_proxy.engine.adapters.inference_server import InferenceServer
from llm_proxy.engine.adapters.labels import ForeignWeights, Labels
from llm_proxy.engine.adapters.shared_memory import SharedMemory
from llm_proxy.engine.adapters.skeleton import base_weights, model_shapes
from llm_proxy.engine.adapters.streamed import Streamed
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.receiver import Receiver, Staged, with_aliases
from llm_proxy.engine.requests import Chunk, Limits, Request
from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, FarmError, InvalidArgument, Unsupported
from rollfarm.run import ModelConfig
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2

log = structlog.get_logger()

_METRICS_SECONDS = 2.0
_ABORT_SECONDS = 0.2
_HEALTH_SECONDS = 5.0
_HEALTH_SHARE = 0.9
"""Of the caller's deadline; the rest is left for the answer that the server gave none."""


class Server(Protocol):
    """What the adapter needs of a kind of server. Whatever it tells the server may raise a FarmError."""

    http: InferenceServer
    labels: Labels

    version: str
    """Its own; known, as the rest, after `start`."""

    is_pristine: bool
    """Whether it had the weights that it was started with when this host came."""

    cannot_sleep: str
    """Why it cannot; empty where it can."""

    async def start(self, limits: Limits) -> None:
        """Have a server that takes requests, with weights that are nobody's yet. Raises ConfigError."""
        ...

    async def stop(self) -> None:
        """End a child."""
        ...

    def generate(self, request: Request, *, cache_key: str) -> AsyncGenerator[Chunk, None]:
        """The answer, in as many chunks as the settings ask for. Only the last has spans, and those of the whole
        output. Cached prefixes are found under the same `cache_key` alone."""
        ...

    async def abort(self, keys: AbstractSet[str]) -> None:
        """Stop requests; each still answers with what it has."""
        ...

    async def stand_still(self, *, keep_cache: bool) -> None:
        """Answer once no forward pass runs. Unless the cache is kept, what runs is computed again afterwards."""
        ...

    async def go_on(self) -> None:
        """End standing still."""
        ...

    async def load(self, label: str, weights: Mapping[str, Any], *, keep_cache: bool) -> None:
        """Load what SharedMemory describes; the server stands still."""
        ...

    async def fall_asleep(self, *, discard_weights: bool) -> None:
        """Free the memory of the KV cache, and of the weights where asked; nothing runs."""
        ...

    async def wake_up(self, *, weights_alone: bool) -> None:
        """Take memory back."""
        ...

    async def rename_weights(self, label: str) -> None:
        """Call the weights otherwise; nothing runs."""
        ...

    async def kv_cache_usage(self) -> float:
        """Share of the KV cache in use."""
        ...

    async def check(self, seconds: float) -> None:
        """Raise EngineFailed unless it says within `seconds` that it is well."""
        ...


class ServedAdapter:
    """One server."""

    limits: Limits

    def __init__(self, name: str, server: Server, model: ModelConfig, config: EngineConfig) -> None:
        self.name = name
        self._server = server
        self._model = model
        self._config = config
        self._memory = SharedMemory()
        self._changing = asyncio.Lock()
        """Held while the server is made to stand still, load, sleep or go on: it never goes on with half a version."""

        self._expected: dict[str, Tensor]
        self._receiver: Receiver
        self._tasks: Tasks
        self._admission: Admission
        self._paused = False
        self._asleep = False
        self._has_weights = True
        self._version = 0
        self._loads = 0
        """Grows when a load begins and when it is done: odd, nobody can tell which weights are there."""

        self._kv_cache_usage = 0.0

    async def start(self, deliver: Deliver) -> None:
        self._expected, self.limits = await in_thread(lambda: model_shapes(self._model, self._config))
        self._receiver = Receiver(
            self._expected,
            seconds=self._config.weights_seconds,
            allocate=self._memory.allocate,
            model=self._model,
            loads_parts=False,
        )
        await self._server.start(self.limits)
        await self._begin_at_base()
        self._tasks = Tasks()
        self._admission = Admission(self._generate, deliver, self._tasks, slot_count=self.limits.slot_count)
        self._tasks.spawn(self._server.http.watch())
        self._tasks.spawn(self._read_metrics())

    async def _begin_at_base(self) -> None:
        """Version 0: as the server was started, or loaded again where it has served others. Raises ConfigError."""
        try:
            if self._server.is_pristine:
                await self._server.rename_weights(self._server.labels.label(0))
            else:
                base = await in_thread(lambda: base_weights(self._model, self._memory.allocate))
                await self._load(base, keep_cache=False)
        except (EngineFailed, InvalidArgument) as failure:
            await self._server.stop()
            raise ConfigError(
                f"engine.{self.name}: {self._server.http.title} does not take the weights of {self._model.path}: "
                f"{failure.problem} Start it anew; in a container of its own it has to see this host's /proc, and run "
                "as the same user."
            ) from failure

    async def watch(self) -> None:
        await asyncio.shield(self._tasks.over)

    async def _read_metrics(self) -> None:
        while True:
            with contextlib.suppress(FarmError):
                self._kv_cache_usage = await self._server.kv_cache_usage()
            await asyncio.sleep(_METRICS_SECONDS)

    async def stop(self) -> None:
        self._tasks.stop()
        await self._server.stop()
        self._memory.close()

    def submit(self, requests: Sequence[Request]) -> None:
        self._admission.submit(requests)

    def cancel(self, keys: Sequence[str]) -> None:
        if running := self._admission.cancel(keys):
            self._tasks.spawn(self._abort(running))

    async def _abort(self, keys: AbstractSet[str]) -> None:
        """Again and again: a server forgets an abort that overtakes its request."""
        while running := keys & self._admission.running:
            try:
                await self._server.abort(running)
            except FarmError as failure:
                log.warning("not aborted", engine=self.name, cause=str(failure))
            await asyncio.sleep(_ABORT_SECONDS)

    async def _generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        title, loads = self._server.http.title, self._loads
        streamed = Streamed(request.key, title=title, version=self._version)
        label = self._server.labels.label(self._version)
        try:
            async with aclosing(self._server.generate(request, cache_key=label)) as answer:
                async for said in answer:
                    unchanged = loads == self._loads and loads % 2 == 0
                    if (chunk := streamed.take(said, unchanged=unchanged)) is not None:
                        yield chunk
            streamed.end()
        except FarmError as failure:
            if isinstance(failure, ForeignWeights):
                self._tasks.fail(failure)
            if not streamed.is_over:
                yield Chunk(request.key, failure=failure)

    async def pause(self) -> None:
        async with self._changing:
            await self._server.stand_still(keep_cache=True)
            self._paused = True

    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._server.go_on()

    async def join_weights(self, group: engine_pb2.WeightGroup) -> None:
        await self._receiver.join(group)

    async def stage_weights(self, request: engine_pb2.StageWeightsRequest) -> int:
        return await self._receiver.stage(request)

    async def apply_weights(self, policy_version: int, mode: UpdateMode) -> float:
        async def load(staged: Staged) -> float:
            try:
                if mode == engine_pb2.UPDATE_MODE_DRAIN and not self._paused:
                    await self._admission.drain()
                async with self._changing:
                    if mode == engine_pb2.UPDATE_MODE_RESUME:
                        await self._give_back()
                    return await self._load(staged, keep_cache=mode == engine_pb2.UPDATE_MODE_KEEP_CACHE)
            except Exception as error:  # paused, with half-loaded weights: neither may go on
                self._tasks.fail(error)
                raise
            finally:
                self._reopen()

        return await self._receiver.apply(policy_version, load)

    async def _give_back(self) -> None:
        """Admit no more, abort what runs, and wait for the answers."""
        self._admission.hold()
        self._tasks.spawn(self._abort(self._admission.running))
        if self._paused:  # aborted requests answer with their next step
            await self._server.go_on()
        await self._admission.drain()
        if self._paused:
            await self._server.stand_still(keep_cache=True)

    async def _load(self, staged: Staged, *, keep_cache: bool) -> float:
        began = time.perf_counter()
        if self._asleep:
            await self._server.wake_up(weights_alone=True)
        await self._server.stand_still(keep_cache=keep_cache)
        tensors = with_aliases(staged.tensors, self._expected)
        label = self._server.labels.label(staged.policy_version)
        self._loads += 1
        await self._server.load(label, self._memory.describe(staged.memory, tensors), keep_cache=keep_cache)
        self._loads += 1
        self._version, self._has_weights = staged.policy_version, True
        if not self._paused and not self._asleep:
            await self._server.go_on()
        return time.perf_counter() - began

    async def discard_weights(self, policy_version: int) -> None:
        self._receiver.discard(policy_version)

    async def sleep(self, *, discard_weights: bool) -> None:
        self._refuse_unless_it_can_sleep()

        async def rest() -> None:
            self._admission.close()
            async with self._changing:
                if not self._asleep:
                    await self._give_back()
                await self._server.fall_asleep(discard_weights=discard_weights)
                self._asleep = True
                self._has_weights = self._has_weights and not discard_weights

        await self._receiver.sleep(rest, discard_weights=discard_weights)

    async def wake_up(self) -> None:
        self._refuse_unless_it_can_sleep()
        async with self._changing:
            if self._asleep:
                await self._server.wake_up(weights_alone=False)
                self._asleep = False
                await (self._server.stand_still(keep_cache=True) if self._paused else self._server.go_on())
        self._reopen()

    def _refuse_unless_it_can_sleep(self) -> None:
        if self._server.cannot_sleep:
            raise Unsupported(self._server.cannot_sleep)

    def _reopen(self) -> None:
        if self._has_weights and not self._asleep:
            self._admission.reopen()

    async def check(self) -> None:
        """What runs the model may be busy with new weights for long; then the rest of the server has to answer."""
        if not self._changing.locked():
            try:
                await self._server.check(_HEALTH_SHARE * rpc.remaining(_HEALTH_SECONDS))
            except EngineFailed:
                if not self._changing.locked():
                    raise
            else:
                return
        await self._server.http.check(_HEALTH_SHARE * rpc.remaining(_HEALTH_SECONDS))

    def status(self) -> EngineStatus:
        return EngineStatus(
            policy_version=self._version,
            running_count=self._admission.running_count,
            waiting_count=self._admission.waiting_count,
            generated_token_count=self._admission.generated_token_count,
            paused=self._paused,
            kv_cache_usage=self._kv_cache_usage,
            sleeping=self._asleep or not self._has_weights,
            server_version=self._server.version,
        )
