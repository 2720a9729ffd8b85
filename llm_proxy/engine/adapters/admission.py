"""Requests on their way through an inference server: all but a few wait here until it has a slot."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from llm_proxy.engine.adapters import Deliver
from llm_proxy.engine.requests import ABORT, Chunk, Request

Generate = Callable[[Request], AsyncGenerator[Chunk, None]]
"""A request's whole life in the server, up to its last chunk. A failure that is the request's own is in that."""


READY_SHARE = 0.05
"""So many requests, as a share of its slots, lie ready within a server beside those that run: it fills a freed slot at
its next step, and not only when somebody has heard of it. `llm_proxy.oversubscription` sends them."""


class Tasks:
    """Background work of one adapter. One that raises is a bug, and ends `over`."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the adapter was stopped; failed when something broke."""

        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the host."""
        if not self.over.done():
            self.over.set_exception(error)

    def stop(self) -> None:
        """Cancel what runs."""
        if not self.over.done():
            self.over.set_result(None)
        for task in list(self._running):
            task.cancel()


class Admission:
    """Who waits and who runs."""

    def __init__(self, generate: Generate, deliver: Deliver, tasks: Tasks, *, slot_count: int) -> None:
        self.generated_token_count = 0
        self._generate = generate
        self._deliver = deliver
        self._tasks = tasks
        self._slot_count = slot_count
        self._room = slot_count + int(slot_count * READY_SHARE)
        self._waiting: deque[Request] = deque()
        self._running: set[str] = set()
        self._closed = False
        self._quiet = asyncio.Condition()

    @property
    def running(self) -> frozenset[str]:
        """Keys of the requests in the server."""
        return frozenset(self._running)

    @property
    def running_count(self) -> int:
        """Requests that the server decodes."""
        return min(len(self._running), self._slot_count)

    @property
    def waiting_count(self) -> int:
        """Requests held back, and those that lie ready."""
        return len(self._waiting) + len(self._running) - self.running_count

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin each once the server has room for it."""
        self._waiting.extend(requests)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and not self._closed and len(self._running) < self._room:
            request = self._waiting.popleft()
            self._running.add(request.key)
            self._tasks.spawn(self._run(request))

    async def _run(self, request: Request) -> None:
        async with aclosing(self._generate(request)) as chunks:
            async for chunk in chunks:
                self.generated_token_count += len(chunk.token_ids)
                if chunk.is_last:
                    self._running.discard(request.key)
                self._deliver([chunk])
        self._admit()
        async with self._quiet:
            self._quiet.notify_all()

    def cancel(self, keys: Sequence[str]) -> set[str]:
        """End those that wait, with ABORT. The others of `keys` that are open run: the server has to abort them."""
        wanted = set(keys)
        queued = [request.key for request in self._waiting if request.key in wanted]
        if queued:
            self._waiting = deque(request for request in self._waiting if request.key not in wanted)
            self._deliver([Chunk(key, finish=ABORT) for key in queued])
        return wanted & self._running

    def close(self) -> None:
        """Give back what waits, with ABORT, and let later requests wait until `reopen`."""
        self._closed = True
        self.cancel([request.key for request in self._waiting])

    def hold(self) -> None:
        """Admit no more until `reopen`."""
        self._closed = True

    async def drain(self) -> None:
        """Admit no more, and wait until nothing runs."""
        self.hold()
        async with self._quiet:
            while self._running:
                await self._quiet.wait()

    def reopen(self) -> None:
        """Admit again."""
        self._closed = False
        self._admit()
