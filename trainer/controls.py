"""What people ask of a running trainer: pause, go on, save, stop. The controller looks between steps."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from rollfarm.errors import FarmError, Unavailable
from rollfarm.service import Changed

T = TypeVar("T")

FOREVER_SECONDS = 7 * 24 * 3600.0


class Draining(Exception):
    """The trainer was asked to stop: finish what cannot be repeated, and leave."""


class Interrupted(Exception):
    """Somebody wants something before the wait is over."""


class Controls:
    """Requests, and who waits for them to be met."""

    def __init__(self) -> None:
        self.draining = False
        self.paused = False
        self._checkpoints: list[asyncio.Future[tuple[Path, int]]] = []
        self._changed = Changed()

    def drain(self) -> None:
        self.draining = True
        self._changed.notify()

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._changed.notify()

    async def checkpoint(self) -> tuple[Path, int]:
        """Ask for a checkpoint; where it lies and the steps that it holds, once it is committed."""
        if self.draining:
            raise Unavailable("The trainer is stopping.")
        request: asyncio.Future[tuple[Path, int]] = asyncio.get_running_loop().create_future()
        self._checkpoints.append(request)
        self._changed.notify()
        return await request

    @property
    def checkpoint_wanted(self) -> bool:
        return bool(self._checkpoints)

    def checkpointed(self, path: Path, step_count: int) -> None:
        """Answer everyone who asked for a checkpoint."""
        for request in self._checkpoints:
            if not request.done():
                request.set_result((path, step_count))
        self._checkpoints.clear()

    def refuse(self) -> None:
        """Answer everyone who still waits: it is over."""
        self.not_checkpointed(Unavailable("The trainer is stopping."))

    def not_checkpointed(self, error: FarmError) -> None:
        """Answer everyone who asked for a checkpoint that there is none."""
        for request in self._checkpoints:
            if not request.done():
                request.set_exception(error)
        self._checkpoints.clear()

    async def until_draining(self) -> None:
        await self._until(lambda: self.draining)

    async def until_wanted(self) -> None:
        """Until the controller has something to do besides waiting for a batch."""
        await self._until(lambda: self.draining or self.checkpoint_wanted)

    async def until_released(self) -> None:
        """Until a paused trainer has something to do."""
        await self._until(lambda: self.draining or self.checkpoint_wanted or not self.paused)

    async def unless_draining(self, work: Awaitable[T], *, grace: float = 0.0) -> T:
        """`work`, unless the trainer has to go first and `grace` seconds more are over. Raises Draining then."""
        try:
            return await unless(self.until_draining, work, grace=grace)
        except Interrupted:
            raise Draining from None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while await self._changed.first(lambda: condition() or None, FOREVER_SECONDS) is None:
            pass


async def unless(interruption: Callable[[], Awaitable[None]], work: Awaitable[T], *, grace: float = 0.0) -> T:
    """`work`, unless `interruption` ends first and `grace` seconds after it. Raises Interrupted then."""
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(interruption())
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=grace)
        if not task.done():
            raise Interrupted
        return task.result()
    finally:
        for each in (task, alarm):
            each.cancel()
        await asyncio.gather(task, alarm, return_exceptions=True)
