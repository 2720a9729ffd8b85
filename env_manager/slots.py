"""The places for episodes: who wants to begin one waits here until there are any."""

import asyncio
from collections.abc import Callable

import prometheus_client

from env_manager.concurrency import Concurrency
from rollfarm.v1 import llm_proxy_pb2

LIMIT = prometheus_client.Gauge("rollfarm_env_manager_slots", "Episodes that may be played at once now.")
RUNNING = prometheus_client.Gauge("rollfarm_env_manager_running_episodes", "Episodes being played; not those scored.")


class Slots:
    """An episode has a slot from its lease until it is played. Its scoring takes none."""

    def __init__(self, slots: int, *, least: int, queue_share: float, now: Callable[[], float]) -> None:
        self._now = now
        self._concurrency = Concurrency(slots, least, queue_share, now())
        self._freed = asyncio.Event()
        LIMIT.set_function(lambda: self.limit)
        RUNNING.set_function(lambda: self.running)

    @property
    def limit(self) -> int:
        """Episodes that may be played at once now."""
        return self._concurrency.limit

    @property
    def running(self) -> int:
        """Episodes that are being played."""
        return self._concurrency.running

    async def free(self) -> int:
        """Wait until there are slots; answers how many."""
        while not self._concurrency.free:
            self._freed.clear()
            await self._freed.wait()
        return self._concurrency.free

    def take(self) -> None:
        self._concurrency.begin(self._now())

    def give(self) -> None:
        self._concurrency.end(self._now())
        self._freed.set()

    def generated(self, result: llm_proxy_pb2.GenerationResult) -> None:
        """Learn from a finished generation whether the engines keep up."""
        queued = result.queue_duration.ToNanoseconds() / 1e9
        generating = result.generate_duration.ToNanoseconds() / 1e9
        if self._concurrency.generated(queued, generating, self._now()):
            self._freed.set()
