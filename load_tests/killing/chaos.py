"""Kills services of a running farm at random moments, and waits after each kill until they do useful work again."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from load_tests.killing.evidence import Evidence
from load_tests.killing.farm import Farm, FarmEnded

RECOVERY_SECONDS = 120.0
"""Longest wait for work after a kill."""

LONGEST_PAUSE_SECONDS = 2.0
"""A kill comes at any moment within this after the last recovery."""

AT_ONCE = 0.5
"""Share of the kills that come the moment an acknowledgement passes, when what it says must be safe already."""

NEXT_WRITE_SECONDS = 2.0

PAIRS = 0.2
"""Share of the moments at which two services die at once."""

WARM_STEPS = 2
"""Batches before the first kill."""

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL."""

    service: str
    seconds: float
    """From the signal until the service did useful work again."""


class Sign:
    """What shows that a service killed now does useful work again.

    sample_buffer and Valkey: a write is acknowledged that was asked for later. env_manager: a sample is accepted that
    a worker played which is new. Trainer: a batch is sent to a trainer which is new.
    """

    def __init__(self, evidence: Evidence, service: str) -> None:
        self.service = service
        self.killed_at = time.time()
        self._evidence = evidence
        self._writes = len(evidence.writes)
        self._leased, self._accepted = len(evidence.leased), len(evidence.accepted)
        self._deliveries = len(evidence.deliveries)
        self._workers = set(evidence.workers)
        self._trainers = {delivery.trainer_id for delivery in evidence.deliveries}

    def seen_at(self) -> float | None:
        """When it was first seen."""
        if self.service == "trainer":
            new = self._evidence.deliveries[self._deliveries :]
            return next((each.at for each in new if each.trainer_id not in self._trainers), None)
        if self.service == "env_manager":
            new = self._evidence.leased[self._leased :]
            leases = {lease for each in new if each.worker_id not in self._workers for lease in each.leases}
            accepted = self._evidence.accepted[self._accepted :]
            return next((each.at for each in accepted if each.lease_id in leases), None)
        writes = self._evidence.writes[self._writes :]
        return next((done for began, done in writes if began > self.killed_at), None)


class Chaos:
    """Kills until it has killed `kills` times. Which and when is a function of the seed."""

    def __init__(
        self, farm: Farm, evidence: Evidence, services: Sequence[str], *, kills: int, seed: int, say: Say
    ) -> None:
        self._farm = farm
        self._evidence = evidence
        self._services = services
        self._wanted = kills
        self._random = random.Random(seed)
        self._say = say
        self.kills: list[Kill] = []

    async def run(self) -> None:
        """Raises FarmEnded when the farm does not survive."""
        await self._until(self._warm, "its first batches")
        while (left := self._wanted - len(self.kills)) > 0:
            pause = self._random.uniform(0, LONGEST_PAUSE_SECONDS)
            both = min(left, len(self._services)) > 1 and self._random.random() < PAIRS
            victims = self._random.sample(self._services, 2 if both else 1)
            await asyncio.sleep(pause)
            await self._kill(victims, pause)

    def _warm(self) -> float | None:
        evidence = self._evidence
        everyone = len(evidence.workers) == len(self._farm.pids("env_manager"))
        return time.time() if everyone and len(evidence.deliveries) > WARM_STEPS else None

    async def _kill(self, victims: Sequence[str], pause: float) -> None:
        pids = [await self._choose(service) for service in victims]
        if self._random.random() < AT_ONCE:
            writes = len(self._evidence.writes)
            await self._evidence.changed.first(lambda: len(self._evidence.writes) > writes or None, NEXT_WRITE_SECONDS)
        signs = [Sign(self._evidence, service) for service in victims]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for sign in signs:
            seen_at = await self._until(sign.seen_at, f"work of {sign.service} after kill {len(self.kills) + 1}")
            self.kills.append(Kill(sign.service, seen_at - sign.killed_at))
            self._say(
                f"kill {len(self.kills):>3}/{self._wanted}  {' and '.join(victims)} after {pause:.1f} s: "
                f"{sign.service} works again in {self.kills[-1].seconds:.1f} s; {self._evidence.committed()} steps"
            )

    async def _choose(self, service: str) -> int:
        """One of its processes; there may be none for the moment."""
        return self._random.choice(await self._until(lambda: self._farm.pids(service) or None, f"{service} lives"))

    async def _until(self, ready: Callable[[], T | None], what: str) -> T:
        """The first non-None `ready()`. Raises FarmEnded when the farm ends first, or nothing comes of it."""
        looking = asyncio.create_task(self._evidence.changed.first(ready, RECOVERY_SECONDS))
        ending = asyncio.create_task(self._farm.process.wait())
        try:
            await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not looking.done():
                status = self._farm.process.returncode
                raise FarmEnded(f"The farm ended with status {status} before {what}.\n{self._farm.last_words()}")
            seen = looking.result()
            if seen is None:
                raise FarmEnded(f"No {what} within {RECOVERY_SECONDS:g} s.\n{self._farm.last_words()}")
            return seen
        finally:
            for task in (looking, ending):
                task.cancel()
