"""Keeps leases alive, and hears at once which of them nobody needs any more."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog

from rollfarm import rpc, times
from rollfarm.errors import DeadlineExceeded, FarmError, is_retryable
from rollfarm.v1 import sample_buffer_pb2

log = structlog.get_logger()
T = TypeVar("T")

PAUSE_SECONDS = 0.2
"""Between heartbeats, so that many leases taken at once are named in one."""


class Heartbeats:
    """Names every lease of `leases` to sample_buffer at least each third of the shortest one."""

    def __init__(
        self,
        stub: Any,
        leases: Mapping[str, sample_buffer_pb2.EpisodeLease],
        cancel: Callable[[sample_buffer_pb2.CancelledLease], None],
        *,
        worker_id: str,
    ) -> None:
        """`stub` is a SampleBufferServiceStub on an aio channel; `cancel` is told what to stop playing."""
        self._stub = stub
        self._leases = leases
        self._cancel = cancel
        self._worker_id = worker_id
        self._taken = asyncio.Event()

    def taken(self) -> None:
        """There are more leases: the heartbeat that waits does not name them."""
        self._taken.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            while not self._leases:
                await self._taken.wait()
                self._taken.clear()
            third = min(lease.lease_duration.ToNanoseconds() for lease in self._leases.values()) / 3e9
            pause = min(PAUSE_SECONDS, third)
            if self._taken.is_set():  # that one arrives, however many more are taken meanwhile
                self._taken.clear()
                await self._beat(0.0, timeout=2 * third)
            else:
                await unless(self._taken, self._beat(third - pause, timeout=2 * third))
            await asyncio.sleep(pause)

    async def _beat(self, seconds: float, *, timeout: float) -> None:
        """One call, which waits `seconds` for a cancellation."""
        request = sample_buffer_pb2.HeartbeatRequest(
            worker_id=self._worker_id, lease_ids=list(self._leases), wait_duration=times.duration(seconds)
        )
        try:
            answer = await rpc.call(self._stub.Heartbeat, request, timeout=timeout)
        except FarmError as error:
            if not is_outage(error):
                raise
            log.warning("no heartbeat", leases=len(self._leases), cause=str(error))
            return
        for cancelled in answer.cancelled:
            self._cancel(cancelled)


async def unless(event: asyncio.Event, answer: Coroutine[Any, Any, T]) -> T | None:
    """The answer; or None, and it is cancelled, as soon as the event is set."""
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(answer)
        told = group.create_task(event.wait())
        await asyncio.wait((asked, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        asked.cancel()
    return None if asked.cancelled() else asked.result()


def is_outage(error: FarmError) -> bool:
    """Whether sample_buffer was away, and not the caller wrong."""
    return isinstance(error, DeadlineExceeded) or is_retryable(error)
