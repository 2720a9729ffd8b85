"""Saves beside training: the learner is copied between two steps, and written while the next ones go on.

At most one checkpoint is being written, and its step is committed only once it is durable. Where that fails for want of
room, nothing is lost: the run's batches are delivered again until a later checkpoint holds them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import prometheus_client
import structlog

from rollfarm.config import ConfigError
from trainer.backends import Write
from trainer.checkpoints import Checkpoints, CheckpointState
from trainer.disk import remedy

log = structlog.get_logger()

SECONDS = prometheus_client.Counter(
    "rollfarm_trainer_checkpoint_seconds", "Training waits for a copy, and goes on while it is written.", ["part"]
)
FAILURES = prometheus_client.Counter("rollfarm_trainer_checkpoint_failures_count", "Checkpoints not saved.")

T = TypeVar("T")
Copy = Callable[[Path], Awaitable[Write]]
"""Copies the learner, to be written into the folder."""

Commit = Callable[[CheckpointState, Path], Awaitable[None]]
"""Tells sample_buffer of a durable checkpoint."""


class NotSaved(ConfigError):
    """The run cannot end well: what was learnt last is in no checkpoint."""


class Saver:
    """The one checkpoint that is being written, and how the last attempt ended."""

    def __init__(self, checkpoints: Checkpoints, commit: Commit, group: asyncio.TaskGroup) -> None:
        """`group` fails when writing fails otherwise than for want of room, or committing does."""
        self.problem: OSError | None = None
        """Why the last attempt failed; None when it did not."""
        self._checkpoints = checkpoints
        self._commit = commit
        self._group = group
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: asyncio.Task[None] | None = None

    async def begin(self, state: CheckpointState, copy: Copy) -> None:
        """Copy, and begin to write, as soon as the checkpoint before this one is durable and committed."""
        await self.settled()
        if (path := self._checkpoints.find(state.step_count)) is not None:
            self.problem = None
            await self._commit(state, path)
            return
        began, work = time.monotonic(), None
        try:
            work = await self._in_writer(self._checkpoints.begin, state.step_count)
            write = await copy(work)
        except OSError as error:
            await self._give_up(state, work, error)
            return
        SECONDS.labels("copy").inc(time.monotonic() - began)
        self._under_way = self._group.create_task(self._finish(state, work, write), name="checkpoint")

    async def settled(self) -> None:
        """Wait until nothing is being written or committed."""
        if self._under_way is not None:
            await self._under_way
            self._under_way = None

    async def _finish(self, state: CheckpointState, work: Path, write: Write) -> None:
        began = time.monotonic()

        def make() -> Path:
            write()
            return self._checkpoints.complete(work, state)

        try:
            path = await self._in_writer(make)
        except OSError as error:
            await self._give_up(state, work, error)
            return
        self.problem = None
        seconds = time.monotonic() - began
        SECONDS.labels("write").inc(seconds)
        log.info("checkpoint saved", step=state.step_count, path=str(path), write_s=round(seconds, 2))
        await self._commit(state, path)

    async def _give_up(self, state: CheckpointState, work: Path | None, error: OSError) -> None:
        self.problem = error
        FAILURES.inc()
        if work is not None:
            await self._in_writer(self._checkpoints.abandon, work)
        log.error(
            "checkpoint not saved; training goes on, and the next one is tried",
            step=state.step_count,
            folder=str(self._checkpoints.folder),
            cause=str(error),
            remedy=remedy(error),
        )

    async def _in_writer(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work, *args)
