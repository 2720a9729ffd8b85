"""What is generated: prompts whose samples have a long tail of lengths, and rewards by the prompt's difficulty.

The distribution "lognormal-1": a sample's length is the median times exp(z), where z is normal with variance 1, of
which SHARED is common to the samples of a prompt; cut at CUT times the median. A prompt's samples are right with a
probability that is uniform over prompts, so 2 of 9 groups of eight agree, teach nothing, and are replaced: DAPO's
dynamic sampling.
"""

import math
import random
from dataclasses import dataclass

DISTRIBUTION = "lognormal-1"
SHARED = 0.3
CUT = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and what becomes of its samples, whoever generates them."""

    number: int
    lengths: tuple[int, ...]
    """Tokens of each sample."""
    rewards: tuple[bool, ...]

    @property
    def teaches(self) -> bool:
        """Whether its rewards differ."""
        return len(set(self.rewards)) > 1


def prompt(seed: int, step: int, number: int, *, samples: int, median: int) -> Prompt:
    """The prompt at this place of a step's stream: a function of its arguments alone."""
    chance = random.Random(f"{seed} {step} {number}")
    shared = chance.gauss(0, math.sqrt(SHARED))
    difficulty = chance.random()
    drawn = (median * math.exp(shared + chance.gauss(0, math.sqrt(1 - SHARED))) for _ in range(samples))
    lengths = tuple(min(CUT * median, max(1, round(length))) for length in drawn)
    return Prompt(number, lengths, tuple(chance.random() < difficulty for _ in range(samples)))
