"""GEM's worlds (gem-llm), by their id: games, reasoning-gym's data sets, and data sets of questions.

Equal seeds give equal episodes: GEM seeds the process's random numbers, and each episode is given its own.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from env_manager.adapters.adapter import SEEDS, Adapter, corpus_missing, data_missing, wrong_setting
from env_manager.adapters.chance import Chance
from rollfarm import reasoning
from rollfarm.env import Observation, Step

HUB = ("math:", "code:", "logic:", "qa:")
"""Worlds whose questions lie on Hugging Face's hub."""


class Gem(Adapter):
    """One of GEM's worlds. It runs in a process: GEM draws from the process's random numbers, and its import, which
    brings reasoning-gym's, holds the interpreter for seconds."""

    name = "gem"
    package = "gem"
    runs = "process"

    def __init__(self, *, id: str, options: dict[str, Any] = {}) -> None:  # noqa: B006
        """`options` go to gem.make."""
        self._id, self._options = id, options
        self._world: Any = None

    def reset(self, seed: int, index: int) -> Observation:
        self._chance = Chance(seed % SEEDS)
        with self._chance:
            text, info = self._begin(seed % SEEDS)
        return Observation(_joined(text, info))

    def step(self, action: str) -> Step:
        with self._chance:
            text, reward, terminated, truncated, info = self._world.step(str(action))
        done = bool(terminated or truncated)
        return Step(
            "" if done else _joined(text, info),
            reward=float(reward),
            done=done,
            truncated=bool(truncated and not terminated),
        )

    def close(self) -> None:
        if hasattr(self._world, "close"):
            self._world.close()

    def _begin(self, seed: int) -> tuple[str, dict[str, Any]]:
        gem = self.load()
        try:
            self._world = gem.make(self._id, **self._options)
            if hasattr(self._world.unwrapped, "ds"):
                self._world.unwrapped.reward_fn = functools.partial(_scored, self._world.unwrapped.reward_fn)
            return self._world.reset(seed=seed)
        except LookupError as error:
            raise corpus_missing(type(self), self._id, error) or error from None
        except (ImportError, OSError):
            if not self._id.startswith(HUB):
                raise
            how = "`pip install datasets`, and load it once where the hub can be reached"
            raise data_missing(type(self), self._id, "a data set of Hugging Face's hub", how) from None
        except (TypeError, ValueError) as error:
            raise wrong_setting(type(self), f"gem.make({self._id!r}) failed: {error}") from None


def _scored(scorer: Callable[..., float], answer: str | None, entry: Mapping[str, Any]) -> float:
    """As reasoning-gym's data sets score, but for what they would run. GEM gives None where it finds no answer."""
    return reasoning.score(scorer, answer or "", entry)


def _joined(text: str, info: dict[str, Any]) -> str:
    """What GEM shows of a turn: its observation between what its info puts before and after it."""
    return "\n".join(part for part in (info.get("prefix"), text, info.get("suffix")) if part)
