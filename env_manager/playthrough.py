"""Plays one episode of a built-in environment here, without a farm: for demonstrations, scores and tests."""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from env_manager.environments.solvable import Solvable
from rollfarm.env import Action, Observation, Step


@dataclass(frozen=True, slots=True)
class Playthrough:
    """A finished episode."""

    shown: Observation
    """Its beginning."""

    turns: list[tuple[str, Step]]
    """Each action and its answer."""

    seconds: float = field(compare=False, repr=False)
    """Wall time that the environment took."""

    @property
    def reward(self) -> float:
        return sum(step.reward for _, step in self.turns)

    @property
    def success(self) -> float:
        return self.turns[-1][1].metrics["success"]

    @property
    def texts(self) -> list[str]:
        """All that was shown."""
        return [self.shown.system, self.shown.text, *(step.text for _, step in self.turns)]


async def play(environment: Solvable, seed: int, act: Callable[[Solvable], str]) -> Playthrough:
    """One episode of the task of `seed`, in which `act` chooses each action."""
    begun = time.perf_counter()
    shown = environment.reset(seed, 0)
    shown = await shown if inspect.isawaitable(shown) else shown
    assert isinstance(shown, Observation)
    seconds = time.perf_counter() - begun
    turns: list[tuple[str, Step]] = []
    while not turns or not turns[-1][1].done:
        action = act(environment)
        begun = time.perf_counter()
        step = environment.step(Action(action))
        turns.append((action, await step if inspect.isawaitable(step) else step))
        seconds += time.perf_counter() - begun
    return Playthrough(shown, turns, seconds)
