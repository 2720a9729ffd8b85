"""Makes what the runs decide durable before anybody hears of it.

Commands run at once on the state in memory; their events wait for the next append, which carries everything decided
since the one before (group commit), and callers wait for that. Should an append fail, the state may be ahead of the
journal: it is thrown away and read back, and until then every command is refused.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from rollfarm.errors import FarmError, JournalFenced, JournalUnavailable
from rollfarm.service import Changed
from sample_buffer import events
from sample_buffer.config import SampleBufferConfig
from sample_buffer.journal import Journal, Record
from sample_buffer.runs import Runs

log = structlog.get_logger()
T = TypeVar("T")

RECOVER_SECONDS = 0.25
"""Between attempts to reach a journal that is away."""

TICK_SECONDS = 0.25
"""Between looks for overdue leases."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch, by a clock that is never set back."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


class Ledger:
    """The runs, their payloads and their journal. Refuses every command until `open` returned."""

    def __init__(self, config: SampleBufferConfig, journal: Journal, now: Callable[[], float] | None = None) -> None:
        self._config = config
        self._journal = journal
        self._down: FarmError | None = JournalUnavailable("The journal is not open yet.")
        self._bug: Exception | None = None
        self._payloads: dict[str, bytes] = {}
        self._added: dict[str, bytes] = {}
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[None] | None = None
        self._flying: asyncio.Future[None] | None = None
        self._since_snapshot = 0
        self.now = now or steady_clock()
        self.changed = Changed()
        self.runs = Runs()

    async def open(self) -> None:
        """Become the journal's writer and read it. Raises JournalUnavailable or JournalFenced."""
        began = time.monotonic()
        runs = Runs()
        snapshot = await self._journal.open()
        if snapshot is not None:
            runs.load(snapshot)
        count = 0
        async for record in self._journal.records():
            for event in events.decode(record):
                runs.apply(event)
                count += 1
        ids = runs.payload_ids()
        payloads = await self._journal.payloads(ids)
        if missing := set(ids) - payloads.keys():
            raise JournalUnavailable(f"The journal has lost {len(missing)} trajectories, among them {min(missing)}.")
        runs.resume(self.now())
        self.runs, self._payloads = runs, payloads
        self._added, self._next, self._flying = {}, None, None
        self._since_snapshot = count
        self._down = None
        self.execute(self._limit)
        self.changed.notify()
        seconds = round(time.monotonic() - began, 3)
        log.info("journal open", events=count, trajectories=len(payloads), seconds=seconds)

    def _limit(self, runs: Runs) -> None:
        runs.limit(self._config.retained_trajectories, self._config.remembered_requests, self.now())

    def execute(self, command: Callable[[Runs], T]) -> T:
        """Run one command on the state. Nobody may hear its answer before `durable`. Raises JournalUnavailable."""
        self._check()
        try:
            return command(self.runs)
        except FarmError:
            raise
        except Exception as bug:  # the state may be half changed: `run` ends the process
            self._bug = bug
            self._wanted.set()
            raise
        finally:
            if self.runs.outbox:
                self._wanted.set()

    def _check(self) -> None:
        if self._down is not None:
            raise type(self._down)(self._down.problem, **self._down.facts)

    def keep(self, lease_id: str, payload: bytes) -> None:
        """Keep the payload of a lease that was just completed, in the same turn."""
        self._payloads[lease_id] = payload
        self._added[lease_id] = payload

    def payload(self, lease_id: str) -> bytes:
        """The trajectory that was completed under a lease."""
        return self._payloads[lease_id]

    async def durable(self) -> None:
        """Return once everything decided so far is in the journal. Raises JournalUnavailable or JournalFenced."""
        self._check()
        if self.runs.outbox:
            if self._next is None:
                self._next = _future()
            await asyncio.shield(self._next)
        elif self._flying is not None:
            await asyncio.shield(self._flying)

    async def run(self) -> None:
        """Append what is decided, forever. Raises JournalFenced, which is the end of this process."""
        task = asyncio.current_task()
        # asyncio.wait_for of Python 3.11, which redis uses, may swallow a cancellation: look for it.
        while task is None or not task.cancelling():
            await self._wanted.wait()
            self._wanted.clear()
            if self._bug is not None:
                raise self._bug
            if self.runs.outbox:
                await self._flush()

    async def _flush(self) -> None:
        record = self._cut()
        done = self._next or _future()
        self._flying, self._next = done, None
        try:
            await self._journal.append(record)
        except JournalUnavailable as error:
            log.warning("journal away", cause=error.problem)
            self._refuse(done, error)
            await self._recover()
        except JournalFenced as error:
            self._refuse(done, error)
            raise
        except BaseException:
            self._refuse(done, JournalUnavailable("sample_buffer is stopping."))
            raise
        else:
            done.set_result(None)
            self._flying = None
            self.changed.notify()

    def _refuse(self, done: asyncio.Future[None], error: FarmError) -> None:
        """Fail everybody who waits, and everybody to come."""
        self._down = error
        for waiting in (done, self._next):
            if waiting is not None:
                waiting.set_exception(error)

    def _cut(self) -> Record:
        decided = list(self.runs.outbox)
        self.runs.outbox.clear()
        added, self._added = self._added, {}
        garbage = self.runs.garbage()
        for name in garbage:
            self._payloads.pop(name, None)
        self._since_snapshot += len(decided)
        snapshot = None
        if self._since_snapshot >= self._config.snapshot_every_events:
            snapshot = self.runs.dump()
            self._since_snapshot = 0
        return Record(events.encode(decided), added, garbage, snapshot)

    async def _recover(self) -> None:
        while self._down is not None:
            await asyncio.sleep(RECOVER_SECONDS)
            try:
                await self.open()
            except JournalUnavailable as error:
                self._down = error
        log.info("journal back")

    async def tick(self) -> None:
        """End overdue leases, forever."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._down is None and (expired := self.execute(lambda runs: runs.tick(self.now()))):
                log.info("leases expired", leases=expired)

    async def close(self) -> None:
        """Append what is left and let go of the journal."""
        if self._down is None and self.runs.outbox:
            await self._journal.append(self._cut())
        await self._journal.close()


def _future() -> asyncio.Future[None]:
    """A future whose failure may go unseen: its waiters may have hung up."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
