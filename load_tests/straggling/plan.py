"""What is played: latencies, sizes and scales, and what their arithmetic alone would give."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from load_tests.straggling.world import LATENCIES

GROUP_SIZE = 8
REDUNDANT_MEMBERS = 1
REDUNDANT_SHARE = 8
"""One redundant group for so many groups."""

IDEAL_ROUNDS = 9


@dataclass(frozen=True)
class Case:
    """One distribution of latencies."""

    latency: str
    """One of LATENCIES."""

    groups: int
    scale: float
    """Seconds that a second takes."""

    cut_seconds: float
    """What a step may take, before scaling: env_manager's environment_seconds."""

    turns: int = 22

    @property
    def environments(self) -> int:
        return GROUP_SIZE * self.groups

    def ways(self) -> "dict[str, Way]":
        """Every way to play it, by name."""
        return {
            "batch": Way(self, in_lockstep=True, is_redundant=False),
            "batch_redundant": Way(self, in_lockstep=True, is_redundant=True),
            "env": Way(self, in_lockstep=False, is_redundant=False),
            "env_redundant": Way(self, in_lockstep=False, is_redundant=True),
        }


@dataclass(frozen=True)
class Way:
    """One way to play a case: until `groups` groups have GROUP_SIZE members each."""

    case: Case
    in_lockstep: bool
    is_redundant: bool

    @property
    def redundant_groups(self) -> int:
        return self.case.groups // REDUNDANT_SHARE if self.is_redundant else 0

    @property
    def redundant_members(self) -> int:
        return REDUNDANT_MEMBERS if self.is_redundant else 0

    @property
    def begun(self) -> int:
        """Episodes that are begun at once."""
        return (self.case.groups + self.redundant_groups) * (GROUP_SIZE + self.redundant_members)

    def ideal_seconds(self) -> float:
        """How long it would take if nothing but the environments took time: drawn some times, scaled."""
        chance = random.Random(7)
        drawn = fmean(self._ideal(lambda: self._draw(chance)) for _ in range(IDEAL_ROUNDS))
        return self.case.scale * drawn

    def _draw(self, chance: random.Random) -> float:
        """A step; one that is cut is counted as if the next attempt took up where it ended."""
        return min(LATENCIES[self.case.latency](chance), self.case.cut_seconds)

    def _ideal(self, draw: Callable[[], float]) -> float:
        times = [0.0] * self.begun
        for _ in range(self.case.turns):
            times = [time + draw() for time in times]
            if self.in_lockstep:
                released = _smallest(self.case.environments, times)
                times = [max(time, released) for time in times]
        size = GROUP_SIZE + self.redundant_members
        groups = [_smallest(GROUP_SIZE, times[at : at + size]) for at in range(0, self.begun, size)]
        return _smallest(self.case.groups, groups)


def _smallest(count: int, values: list[float]) -> float:
    """The time at which so many are there."""
    return sorted(values)[count - 1]


CASES = (
    Case("normal_10_10", groups=64, scale=0.04, cut_seconds=400),
    Case("normal_10_5", groups=16, scale=0.02, cut_seconds=400),
    Case("lognormal", groups=8, scale=0.008, cut_seconds=3000),
    Case("hangs", groups=16, scale=0.02, cut_seconds=100),
)
"""Scaled so that what the services do by themselves stays small on two cores: about 1 ms of CPU for a turn."""

QUICK = (
    Case("normal_10_10", groups=4, scale=0.01, cut_seconds=400, turns=6),
    Case("hangs", groups=4, scale=0.01, cut_seconds=200, turns=6),
)
