"""The frozen lake, in an environment some of whose episodes fail, whatever the policy does in them.

A fault strikes at the reset, the first step or the last one. None waits for a step that not every episode has: failures
that spare short episodes would choose what is learnt from.
"""

import random
import time
from collections.abc import Callable
from typing import Any

from env_manager.environments.frozen_lake import FrozenLake
from load_tests.failing import injections
from rollfarm import telemetry
from rollfarm.env import Action, Environment, Observation, Step

ENVIRONMENT_SECONDS = 4.0
"""What env_manager gives it to answer. A busy machine may stand still for a second."""

HANG_SECONDS = 2 * ENVIRONMENT_SECONDS


class BrokenIce(Exception):
    """What it raises."""


class FlakyLake(Environment):
    """A lake of size 4 in the compact view, as the demo has it."""

    runs = "thread"

    def __init__(self, *, ledger: str = "", seed: int = 0) -> None:
        """Injections are written to the file `ledger`; without one nothing is made to fail."""
        self._lake = FrozenLake(size=4, view="compact")
        self._faults = injections.of_environment(ledger, seed) if ledger else None
        self._fault = ""

    async def reset(self, seed: int, index: int) -> Observation:
        """On the event loop, where the trace is known; the steps are in a thread."""
        self._trace_id = telemetry.trace_id.get()
        self._strikes_late = random.random() < 0.5
        if self._faults is not None:
            self._fault = self._faults.draw()
        if self._fault == "raises in reset":
            self._inject()
            raise BrokenIce
        return self._lake.reset(seed, index)

    def step(self, action: Action) -> Step:
        step = self._lake.step(action)
        if self._fault and (step.done or not self._strikes_late):
            self._inject()
            return BREAKS[self._fault]()
        return step

    def _inject(self) -> None:
        assert self._faults is not None
        self._faults.inject(self._fault, self._trace_id)


def _raise() -> Any:
    raise BrokenIce


def _hang() -> Step:
    time.sleep(HANG_SECONDS)
    return Step("too late", done=True)


BREAKS: dict[str, Callable[[], Any]] = {
    "raises in step": _raise,
    "returns garbage": lambda: Step(reward=float("nan"), done=True),
    "hangs": _hang,
}
"""What a step does instead, by kind."""
