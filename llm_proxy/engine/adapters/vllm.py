"""vLLM: an unmodified API server, started and supervised as a child, spoken to over a private unix socket.

Requests wait here until vLLM has a slot, so everything that vLLM holds is running. Weights are received in this process
into memory that the child maps (rollfarm.vllm_gloo), so generation goes on until the short pause that loads them. The
child ends with this process, however it ends; and this process ends when the child does.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
from torch import Tensor

from llm_proxy.engine.adapters import Deliver, EngineStatus, UpdateMode
from llm_proxy.engine.adapters.vllm_server import SharedMemory, VllmServer, model_shapes, read_metrics
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.receiver import Receiver, Staged, with_aliases
from llm_proxy.engine.requests import ABORT, LENGTH, STOP, Chunk, FinishReason, Limits, Request
from rollfarm import rpc
from rollfarm.errors import EngineFailed, InvalidArgument
from rollfarm.run import ModelConfig
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2

log = structlog.get_logger()

_FINISH: dict[str, FinishReason] = {"stop": STOP, "length": LENGTH, "abort": ABORT}
_METRICS_SECONDS = 2.0
_HEALTH_SECONDS = 5.0
_HEALTH_SHARE = 0.9
"""Of the caller's deadline; the rest is left for the answer that vLLM gave none."""


class VllmAdapter:
    """One vLLM server."""

    name = "vllm"
    limits: Limits

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._config = config
        self._server = VllmServer(model, config)
        self._memory = SharedMemory()
        self._model = model
        self._expected: dict[str, Tensor]
        self._receiver: Receiver
        self._deliver: Deliver
        self._over: asyncio.Future[None]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: deque[Request] = deque()
        self._running: set[str] = set()
        self._quiet = asyncio.Condition()
        self._draining = False
        self._paused = False
        self._version = 0
        self._generated = 0
        self._kv_cache_usage = 0.0

    async def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._over = asyncio.get_running_loop().create_future()
        self._expected, self.limits = await in_thread(lambda: model_shapes(self._model, self._config))
        self._receiver = Receiver(self._expected, seconds=self._config.weights_seconds, allocate=self._memory.allocate)
        await self._server.start(self.limits)
        self._spawn(self._read_metrics())
        self._spawn(self._watch_server())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task of this adapter. One that raises is a bug, and ends `watch`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Let `watch` raise, and the host end."""
        if not self._over.done():
            self._over.set_exception(error)

    async def watch(self) -> None:
        await asyncio.shield(self._over)

    async def _watch_server(self) -> None:
        raise RuntimeError(f"vLLM ended by itself with status {await self._server.wait()}; its log is above.")

    async def _read_metrics(self) -> None:
        while True:
            with contextlib.suppress(EngineFailed):
                metrics = read_metrics(await self._server.get("/metrics"))
                self._kv_cache_usage = metrics.get("vllm:kv_cache_usage_perc", 0.0)
            await asyncio.sleep(_METRICS_SECONDS)

    async def stop(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
        for task in list(self._tasks):
            task.cancel()
        await self._server.stop()
        self._memory.close()

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        self._admit()

    def cancel(self, keys: Sequence[str]) -> None:
        wanted = set(keys)
        queued = [request for request in self._waiting if request.key in wanted]
        if queued:
            self._waiting = deque(request for request in self._waiting if request.key not in wanted)
            self._deliver([Chunk(request.key, finish=ABORT) for request in queued])
        if running := wanted & self._running:
            self._spawn(self._abort(running))

    async def _abort(self, keys: set[str]) -> None:
        """Where it fails, the requests just run to their end."""
        try:
            await self._server.abort(keys)
        except EngineFailed as failure:
            log.warning("vllm did not abort", cause=str(failure))

    def _admit(self) -> None:
        while self._waiting and not self._draining and len(self._running) < self.limits.slot_count:
            request = self._waiting.popleft()
            self._running.add(request.key)
            self._spawn(self._generate(request))

    async def _generate(self, request: Request) -> None:
        """One request's whole life in vLLM. Its failure is the request's; a bug ends the host."""
        chunk = Chunk(request.key)
        try:
            answer = await self._server.generate(request, cache_salt=f"version-{self._version}")
            _fill(chunk, answer["choices"][0], request)
            self._generated += len(chunk.token_ids)
        except (EngineFailed, InvalidArgument) as failure:
            chunk.failure = failure
        self._running.discard(request.key)
        self._deliver([chunk])
        self._admit()
        async with self._quiet:
            self._quiet.notify_all()

    async def pause(self) -> None:
        await self._server.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        await self._server.post("/resume")

    async def join_weights(self, group: engine_pb2.WeightGroup) -> None:
        await self._receiver.join(group)

    async def stage_weights(self, request: engine_pb2.StageWeightsRequest) -> int:
        return await self._receiver.stage(request)

    async def apply_weights(self, policy_version: int, mode: UpdateMode) -> float:
        async def load(staged: Staged) -> float:
            if mode == engine_pb2.UPDATE_MODE_DRAIN and not self._paused:
                await self._drain()
            try:
                return await self._load(staged, mode)
            except Exception as error:  # paused, with half-loaded weights: neither may go on
                self._end(error)
                raise
            finally:
                self._draining = False
                self._admit()

        return await self._receiver.apply(policy_version, load)

    async def _drain(self) -> None:
        self._draining = True
        async with self._quiet:
            while self._running:
                await self._quiet.wait()

    async def _load(self, staged: Staged, mode: UpdateMode) -> float:
        began = time.perf_counter()
        await self._server.post("/pause", params=_PAUSES[mode])
        await self._server.post("/start_weight_update")
        tensors = with_aliases(staged.tensors, self._expected)
        await self._server.post("/update_weights", {"update_info": self._memory.describe(staged.memory, tensors)})
        await self._server.post("/finish_weight_update", {"weight_version": str(staged.policy_version)})
        self._version = staged.policy_version
        if not self._paused:
            await self._server.post("/resume")
        return time.perf_counter() - began

    async def discard_weights(self, policy_version: int) -> None:
        self._receiver.discard(policy_version)

    async def check(self) -> None:
        await self._server.check(_HEALTH_SHARE * rpc.remaining(_HEALTH_SECONDS))

    def status(self) -> EngineStatus:
        return EngineStatus(
            policy_version=self._version,
            running_count=len(self._running),
            waiting_count=len(self._waiting),
            generated_token_count=self._generated,
            paused=self._paused,
            kv_cache_usage=self._kv_cache_usage,
        )


_PAUSES: dict[UpdateMode, dict[str, str]] = {
    engine_pb2.UPDATE_MODE_KEEP: {"mode": "keep", "clear_cache": "true"},
    engine_pb2.UPDATE_MODE_KEEP_CACHE: {"mode": "keep", "clear_cache": "false"},
    engine_pb2.UPDATE_MODE_RESUME: {"mode": "abort", "clear_cache": "true"},
    engine_pb2.UPDATE_MODE_DRAIN: {"mode": "keep", "clear_cache": "true"},
}
"""How vLLM stands still. Where it keeps its cache, the salt of later requests keeps them off it."""


def _fill(chunk: Chunk, choice: dict[str, Any], request: Request) -> None:
    """Put vLLM's answer into the chunk."""
    chunk.token_ids = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    chunk.logprobs = [item["logprob"] for item in content]
    chunk.spans = [(_version(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"] or []]
    chunk.finish = _FINISH.get(choice["finish_reason"], ABORT)
    if request.top_logprobs:
        chunk.top = [_top(item["top_logprobs"], request.top_logprobs) for item in content]


def _version(label: str) -> int:
    """vLLM's own label of the weights that it began with is no number."""
    return int(label) if label.isdecimal() else 0


def _top(candidates: list[dict[str, Any]], width: int) -> tuple[list[int], list[float]]:
    """The likeliest; vLLM puts the sampled token among them even where it is not."""
    unique = {item["token_id"]: item["logprob"] for item in candidates}
    best = sorted(unique.items(), key=lambda item: -item[1])[:width]
    return [token for token, _ in best], [logprob for _, logprob in best]
