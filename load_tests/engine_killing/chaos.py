"""Kills and stops engines at random moments, and waits each time until they make tokens again."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from load_tests.engine_killing.evidence import Attempt, Evidence
from load_tests.engine_killing.farm import Engine, FarmEnded

LONGEST_PAUSE_SECONDS = 2.0
"""A blow comes at any moment within this after the last recovery."""

PAIRS = 0.25
"""Share of the moments at which all victims are killed at once."""

HANGS = 0.25
"""Share of the moments at which one victim is stopped and, a while later, goes on."""

LONGEST_HANG_SECONDS = 5.0
"""Some are noticed by llm_proxy and some are not."""

RECOVERY_SECONDS = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Blow:
    """One engine was killed and started again at once, or stopped for a while."""

    kind: Literal["kill", "hang"]
    engine: int
    at: float
    victims: frozenset[str]
    """Requests that it had."""
    recovery_seconds: float
    """From the kill, or from the end of the stop, until the engine made tokens again."""


class Chaos:
    """Which engine, when and how is a function of the seed."""

    def __init__(self, victims: Sequence[Engine], evidence: Evidence, *, kills: int, seed: int, say: Say) -> None:
        self._victims = victims
        self._evidence = evidence
        self._wanted = kills
        self._random = random.Random(seed)
        self._say = say
        self.blows: list[Blow] = []

    @property
    def kill_count(self) -> int:
        return sum(blow.kind == "kill" for blow in self.blows)

    async def run(self) -> None:
        """Until there were as many kills as wanted. Raises FarmEnded when an engine does not come back."""
        while (left := self._wanted - self.kill_count) > 0:
            await asyncio.sleep(self._random.uniform(0, LONGEST_PAUSE_SECONDS))
            kind = self._random.random()
            if kind < HANGS:
                await self._hang(self._random.choice(self._victims))
            elif kind < HANGS + PAIRS and left > 1:
                await asyncio.gather(*(self._kill(engine) for engine in self._victims))
            else:
                await self._kill(self._random.choice(self._victims))

    async def _kill(self, engine: Engine) -> None:
        victims, struck_at = self._running(engine), time.monotonic()
        await engine.kill()
        await engine.start()
        recovered_at = await self._works(engine, lambda attempt: attempt.given_at > struck_at, struck_at)
        self._note(Blow("kill", engine.number, struck_at, victims, recovered_at - struck_at))

    async def _hang(self, engine: Engine) -> None:
        victims, struck_at = self._running(engine), time.monotonic()
        engine.hang()
        try:
            await asyncio.sleep(self._random.uniform(0, LONGEST_HANG_SECONDS))
        finally:
            engine.go_on()
        woken_at = time.monotonic()
        recovered_at = await self._works(engine, lambda _: True, woken_at)
        self._note(Blow("hang", engine.number, struck_at, victims, recovered_at - woken_at))

    def _running(self, engine: Engine) -> frozenset[str]:
        attempts = self._evidence.attempts
        return frozenset(each.request_id for each in attempts if each.engine == engine.number and each.ended_at is None)

    async def _works(self, engine: Engine, counts: Callable[[Attempt], bool], since: float) -> float:
        """When the engine made tokens after `since`, of an attempt that counts."""

        def seen_at() -> float | None:
            new = self._evidence.progress_after(since)
            return next(
                (each.at for each in new if each.attempt.engine == engine.number and counts(each.attempt)), None
            )

        at = await self._evidence.changed.first(seen_at, RECOVERY_SECONDS)
        if at is None:
            raise FarmEnded(f"Engine {engine.number} made no tokens within {RECOVERY_SECONDS:g} s.\n{engine.ended}")
        return at

    def _note(self, blow: Blow) -> None:
        self.blows.append(blow)
        self._say(
            f"{blow.kind} {self.kill_count:>3}/{self._wanted}: engine {blow.engine} lost {len(blow.victims)} requests "
            f"and works again after {blow.recovery_seconds:.2f} s; version {self._evidence.committed_version}"
        )
