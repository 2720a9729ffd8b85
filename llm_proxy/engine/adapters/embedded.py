"""The embedded engine: a transformers model in this process, batched continuously in a thread of its own.

The event loop sends commands through a queue; the thread obeys them between two forward passes and hands back what a
pass produced at once. So every command finds the engine at a token boundary, and nothing but the queue is shared.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from llm_proxy.engine.adapters import Deliver, EngineStatus, UpdateMode
from llm_proxy.engine.batching import Batching
from llm_proxy.engine.batching import Sequence as Running
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.metrics import STEP_SECONDS, STEP_TOKENS
from llm_proxy.engine.receiver import Receiver, Staged
from llm_proxy.engine.requests import ABORT, Chunk, FinishReason, Limits, Request
from llm_proxy.engine.runner import Runner, choose_device, load_model
from llm_proxy.engine.sampling import Sampled, new_seed
from rollfarm.errors import FarmError, GenerationFailed
from rollfarm.run import ModelConfig
from rollfarm.v1 import engine_pb2

log = structlog.get_logger()

T = TypeVar("T")

MOST_STEP_TOKENS = 4096
"""Tokens of one forward pass: what a long prompt may delay the others by."""

FLUSH_SECONDS = 0.05
"""How long tokens of an unfinished request are gathered into one chunk."""


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
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        runner = await asyncio.to_thread(self._load)
        self.limits = runner.limits
        self._receiver = Receiver(runner.parameters(), seconds=self._config.weights_seconds)
        self._engine = Engine(runner, deliver=lambda chunks: _call_soon(loop, lambda: deliver(chunks)))
        threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True).start()

    def _load(self) -> Runner:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        return Runner(
            load_model(self._model, choose_device(self._config.device)),
            slots=self._config.slots,
            context_tokens=self._config.context_tokens,
            kv_cache_bytes=self._config.kv_cache,
        )

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        try:
            self._engine.run()
        except BaseException as error:
            crash = error
            _call_soon(loop, lambda: self._ended.set_exception(crash))
        else:
            _call_soon(loop, lambda: self._ended.set_result(None))

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

    async def check(self) -> None:
        """Lives in this process: there is nobody to ask."""

    def status(self) -> EngineStatus:
        return self._engine.status


@dataclass(slots=True, eq=False)
class _Open:
    """A request and its chunk in the making."""

    sequence: Running
    seed: int
    chunk: Chunk


class Update:
    """New weights, and whoever waits for them."""

    def __init__(self, staged: Staged, mode: UpdateMode) -> None:
        self.staged = staged
        self.mode = mode
        self.done: concurrent.futures.Future[float] = concurrent.futures.Future()
        """Seconds that decoding stood still."""


class Engine:
    """Steps the batch until stopped. All but `send`, `ask` and `status` belongs to the engine's thread."""

    def __init__(self, runner: Runner, *, deliver: Deliver) -> None:
        self.status = EngineStatus()
        """As of the last step; replaced, never changed."""

        self._runner = runner
        self._deliver = deliver
        self._batching = Batching(
            slot_count=runner.limits.slot_count, row_count=runner.row_count, step_tokens=MOST_STEP_TOKENS
        )
        self._capacity = runner.row_count * runner.context_tokens
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._out: list[Chunk] = []
        self._flushed = time.monotonic()
        self._stopped = False
        self._paused = False
        self._version = 0
        self._generated = 0
        self._draining: Update | None = None

    def send(self, command: Callable[[], None]) -> None:
        """Have the thread run `command` between two steps."""
        self._commands.put(command)

    async def ask(self, command: Callable[[], T]) -> T:
        """What `command` returns, run as by `send`."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.send(lambda: answer.set_result(command()))
        return await asyncio.shield(asyncio.wrap_future(answer))

    def run(self) -> None:
        """Obey and step until stopped. Waits for a command when there is nothing to compute."""
        while not self._stopped:
            self._obey()
            if self._draining is not None and not self._batching.running_count:
                self._finish_drain()
            if not self._paused and self._batching.has_work():
                self._step()
            self._flush()
            self._report()

    def _obey(self) -> None:
        idle = self._paused or not (self._batching.has_work() or self._draining)
        if idle:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def stop(self) -> None:
        """End `run`."""
        self._stopped = True

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        for request in requests:
            seed = new_seed() if request.seed is None else request.seed
            self._open[request.key] = _Open(self._batching.add(request), seed, Chunk(request.key))

    def cancel(self, keys: Iterable[str]) -> None:
        """End requests with ABORT; unknown ones are ignored."""
        for key in keys:
            if key in self._open:
                self._batching.remove(key)
                self._close(key, finish=ABORT)

    def set_paused(self, paused: bool) -> None:
        """Stand still, or go on."""
        self._paused = paused
        self._report()

    def update(self, update: Update) -> None:
        """Put new weights to use now; in drain mode once the running requests are done, if the engine is not paused."""
        if update.mode == engine_pb2.UPDATE_MODE_DRAIN and not self._paused:
            self._draining = update
            self._batching.admitting = False
        else:
            self._apply(update)

    def _finish_drain(self) -> None:
        update, self._draining = self._draining, None
        self._batching.admitting = True
        if update is not None:
            self._apply(update)

    def _apply(self, update: Update) -> None:
        began = time.perf_counter()
        if update.mode == engine_pb2.UPDATE_MODE_RESUME:
            self.cancel([sequence.request.key for sequence in self._batching.running()])
        self._runner.load(update.staged.tensors)
        if update.mode == engine_pb2.UPDATE_MODE_KEEP_CACHE:
            self._batching.keep_running()
        else:
            self._batching.recompute()
        self._version = update.staged.policy_version
        self._report()
        update.done.set_result(time.perf_counter() - began)

    def _step(self) -> None:
        began = time.perf_counter()
        segments = self._batching.next_step()
        sampling = [self._open[s.sequence.request.key] for s in segments if s.samples]
        sampled = self._runner.step(segments, [opened.seed for opened in sampling])
        self._batching.computed(segments)
        self._take(sampling, sampled)
        STEP_TOKENS.inc(sum(segment.count for segment in segments))
        STEP_SECONDS.observe(time.perf_counter() - began)

    def _take(self, sampling: Sequence[_Open], sampled: Sampled) -> None:
        version = self.status.policy_version
        broken = False
        for opened, token, logprob, top in zip(sampling, sampled.token_ids, sampled.logprobs, sampled.top, strict=True):
            key = opened.chunk.key
            if logprob != logprob:
                broken = True
                self._batching.remove(key)
                failure = GenerationFailed(
                    f"Version {version} gives no finite log-probability.", policy_version=version
                )
                self._close(key, failure=failure)
                continue
            opened.chunk.add(token, logprob, version)
            if top is not None:
                opened.chunk.top.append(top)
            reason = self._batching.append(opened.sequence, token)
            if reason is not None:
                self._close(key, finish=reason)
        self._generated += len(sampled.token_ids)
        if broken:
            self._batching.recompute()
            self._runner.scrub()

    def _close(
        self,
        key: str,
        *,
        finish: FinishReason | None = None,
        failure: FarmError | None = None,
    ) -> None:
        chunk = self._open.pop(key).chunk
        chunk.finish, chunk.failure = finish, failure
        self._out.append(chunk)

    def _flush(self) -> None:
        """Hand over what ended at once, and what goes on now and then."""
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            for opened in self._open.values():
                if opened.chunk.token_ids:
                    self._out.append(opened.chunk)
                    opened.chunk = Chunk(opened.chunk.key)
        if self._out:
            self._deliver(self._out)
            self._out = []

    def _report(self) -> None:
        self.status = EngineStatus(
            policy_version=self._version,
            running_count=self._batching.running_count,
            waiting_count=self._batching.waiting_count,
            generated_token_count=self._generated,
            paused=self._paused,
            kv_cache_usage=self._batching.cached_token_count / self._capacity,
        )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run `callback` in the loop; a loop that is closed already needs nothing any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
