"""An environment that does nothing but take its time, and perhaps waits for the others.

Where `together` is set, turns are played in lock-step: nobody is answered before so many episodes of the batch have
their answer of that turn. Who comes later, because it is behind or is played again, is not kept waiting.
"""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable

from rollfarm.env import Action, Environment, Step

HANG_SECONDS = 1e6
"""What a step that hangs takes, in seconds before scaling: until somebody ends it."""

HANG_SHARE = 0.001

_SIGMA = math.sqrt(math.log(1 + 2.0**2))
"""Of a lognormal with a coefficient of variation of 2."""


def _with_hangs(chance: random.Random) -> float:
    return HANG_SECONDS if chance.random() < HANG_SHARE else max(0.0, chance.gauss(10, 5))


LATENCIES: dict[str, Callable[[random.Random], float]] = {
    "normal_10_5": lambda chance: max(0.0, chance.gauss(10, 5)),
    "normal_10_10": lambda chance: max(0.0, chance.gauss(10, 10)),
    "lognormal": lambda chance: chance.lognormvariate(math.log(10) - _SIGMA**2 / 2, _SIGMA),
    "hangs": _with_hangs,
}
"""Seconds of a step, before scaling. Normal ones are cut at 0; of "hangs", which are N(10,5), 1 in 1000 never ends."""


class Rounds:
    """The turns of one batch in lock-step."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._arrived: Counter[int] = Counter()
        self._released: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def arrive(self, turn: int) -> None:
        """Return when enough have come to the end of this turn."""
        self._arrived[turn] += 1
        if self._arrived[turn] >= self._together:
            self._released[turn].set()
        await self._released[turn].wait()


ROUNDS: dict[str, Rounds] = {}
"""By run: each run is one batch."""


class Straggler(Environment):
    """An episode of a number of turns, each of which takes as long as it takes."""

    runs = "loop"

    def __init__(
        self,
        *,
        run: str = "",
        latency: str = "normal_10_10",
        scale: float = 0.01,
        turns: int = 22,
        together: int = 0,
        cut_seconds: float = 0.0,
    ) -> None:
        """A second of `latency` takes `scale` seconds. `together` 0 waits for nobody, `cut_seconds` 0 cuts nothing."""
        self._rounds = ROUNDS.setdefault(run, Rounds(together)) if together else None
        self._latency = LATENCIES[latency]
        self._scale = scale
        self._cut_seconds = cut_seconds or math.inf
        self._turns = turns
        self._turn = 0
        self._chance = random.Random()

    async def reset(self, seed: int, index: int) -> str:
        return "go"

    async def step(self, action: Action) -> Step:
        seconds = self._latency(self._chance)
        await asyncio.sleep(self._scale * min(seconds, self._cut_seconds))
        if seconds > self._cut_seconds:
            raise TimeoutError("the step hangs")
        if self._rounds is not None:
            await self._rounds.arrive(self._turn)
        self._turn += 1
        return Step("on", reward=1 / self._turns, done=self._turn == self._turns)
