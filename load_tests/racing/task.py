"""What both sides learn: the demo, read from its own file, to a mean reward of the batches."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from load_tests.up import DEMO

TARGET_REWARD = 0.6
"""A random policy has about 0.1; the demo ends at about 0.78."""

WINDOW_STEPS = 8
"""The target is reached when the mean reward over so many steps is that high: batches are noisy."""

MAX_STEPS = 400
"""A run that has not reached it by then never will."""

RUN_SECONDS = 600.0
"""Longest time for one run, its start included."""


@dataclass(frozen=True)
class Raced:
    """One run to the target."""

    seconds: float
    """From the first generation to the end of the step that reached the target."""

    start_seconds: float
    """From the start of the first process to the first generation."""

    steps: int
    """To the target."""


class NotReached(Exception):
    """The run ended, or was given up, below the target."""


def demo() -> dict[str, Any]:
    """The demo's configuration."""
    return tomllib.loads(DEMO.read_text())


def is_reached(rewards: Sequence[float]) -> bool:
    """Whether the last steps' mean reward is the target or more."""
    return len(rewards) >= WINDOW_STEPS and fmean(rewards[-WINDOW_STEPS:]) >= TARGET_REWARD


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is being written."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
