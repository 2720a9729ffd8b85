"""The stepping of an engine that computes in this process, whatever it computes with. Imports no torch.

The event loop sends commands through a queue; the engine's thread obeys them between two steps and hands back what a
step produced at once. So every command finds the engine at a token boundary, and nothing but the queue is shared.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from llm_proxy.engine.adapters import Deliver, EngineStatus, UpdateMode
from llm_proxy.engine.batching import Batching, Segment
from llm_proxy.engine.batching import Sequence as Running
from llm_proxy.engine.metrics import STEP_SECONDS, STEP_TOKENS
from llm_proxy.engine.requests import ABORT, Chunk, FinishReason, Limits, Request
from rollfarm.errors import FarmError, GenerationFailed
from rollfarm.v1 import engine_pb2

if TYPE_CHECKING:
    from torch import Tensor

    from llm_proxy.engine.receiver import Staged

T = TypeVar("T")

MOST_STEP_TOKENS = 4096
"""Tokens of one step: what a long prompt may delay the others by."""

FLUSH_SECONDS = 0.05
"""How long tokens of an unfinished request are gathered into one chunk."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, under the processed distribution; a greedy row's is the unprocessed one's. NaN where the logits were not
    finite, and then the token means nothing."""

    top: list[tuple[list[int], list[float]] | None]
    """Likeliest ids and their log-probabilities, where asked for."""


class Model(Protocol):
    """What computes a step. All of it belongs to the engine's thread."""

    limits: Limits
    row_count: int
    """Rows of its KV cache."""

    context_tokens: int

    @property
    def is_ready(self) -> bool:
        """Whether it has a cache and weights."""
        ...

    def step(self, segments: Sequence[Segment], seeds: Sequence[int]) -> Sampled:
        """Compute the segments, and a token for each that samples. `seeds` belong to those, in order."""
        ...

    def load(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Use these weights from the next step on."""
        ...

    def scrub(self) -> None:
        """Forget what the cache holds: something in it is not finite."""
        ...

    def sleep(self, *, discard_weights: bool) -> None:
        """Free the cache, and the weights where asked."""
        ...

    def wake_up(self) -> None:
        """Have a cache again. Weights that are gone come with the next `load`."""
        ...


def into(loop: asyncio.AbstractEventLoop, deliver: Deliver) -> Deliver:
    """`deliver`, to be called from the engine's thread. A loop that is closed already needs nothing any more."""

    def hand_over(chunks: Sequence[Chunk]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, chunks)

    return hand_over


def new_seed() -> int:
    """A seed for a request that brings none."""
    return random.getrandbits(63)


@dataclass(slots=True, eq=False)
class _Open:
    """A request and its chunk in the making."""

    sequence: Running
    seed: int
    chunk: Chunk


class Update:
    """New weights, and whoever waits for them."""

    def __init__(self, staged: "Staged", mode: UpdateMode) -> None:
        self.staged = staged
        self.mode = mode
        self.done: concurrent.futures.Future[float] = concurrent.futures.Future()
        """Seconds that decoding stood still."""


class Engine:
    """Steps the batch until stopped. All but `send`, `ask` and `status` belongs to the engine's thread."""

    def __init__(self, model: Model, *, deliver: Deliver) -> None:
        self.status = EngineStatus()
        """As of the last step; replaced, never changed."""

        self._model = model
        self._deliver = deliver
        self._batching = Batching(
            slot_count=model.limits.slot_count, row_count=model.row_count, step_tokens=MOST_STEP_TOKENS
        )
        self._capacity = model.row_count * model.context_tokens
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
            if not self._stands_still and self._batching.has_work():
                self._step()
            self._flush()
            self._report()

    @property
    def _stands_still(self) -> bool:
        return self._paused or not self._model.is_ready

    def _obey(self) -> None:
        idle = self._stands_still or not (self._batching.has_work() or self._draining)
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

    def sleep(self, *, discard_weights: bool) -> None:
        """Give every open request back and free memory."""
        if self._model.is_ready:
            self.cancel(list(self._open))
            self._batching.recompute()
        self._model.sleep(discard_weights=discard_weights)
        self._report()

    def wake_up(self) -> None:
        """Take the memory back."""
        self._model.wake_up()
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
        self._model.load(update.staged.tensors)
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
        sampled = self._model.step(segments, [opened.seed for opened in sampling])
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
            self._model.scrub()

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
            sleeping=not self._model.is_ready,
        )
