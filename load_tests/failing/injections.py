"""What is made to fail: drawn by chance, and written down in the moment that it happens.

A line of the ledger names the kind and the trace of its episode, under which the farm's logs speak of it too. So every
single injection can be looked for there.
"""

import functools
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {"raises in reset": 0.07, "raises in step": 0.08, "returns garbage": 0.065, "hangs": 0.005}
"""Kinds of failures of the environment: share of the episodes."""

SANDBOX = {"cannot start": 0.045, "cell killed": 0.03, "cell stopped": 0.005}
"""Kinds of failures of the sandbox: share of all episodes. They happen to those that their environment played."""

SOUND_SHARE = 0.05
"""Of the episodes that their environment played: those for which a program runs to its end."""

OUTCOMES = dict.fromkeys(ENVIRONMENT, "OUTCOME_ENV_FAILED") | dict.fromkeys(SANDBOX, "OUTCOME_REWARD_FAILED")
"""What an episode has to end as, by what was done to it."""


@dataclass(frozen=True)
class Injection:
    """One line of a ledger."""

    kind: str
    """One of OUTCOMES."""

    trace_id: str
    """Of the episode."""

    at: float
    """Unix time."""


class Ledger:
    """Appends, from any process and thread."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, kind: str, trace_id: str) -> None:
        line = json.dumps({"kind": kind, "trace_id": trace_id, "at": time.time()})
        os.write(self._file, f"{line}\n".encode())


def read(path: Path) -> Iterator[Injection]:
    """A ledger's lines; one that was never written to has none."""
    if path.exists():
        yield from (Injection(**json.loads(line)) for line in path.read_text().splitlines())


class Faults:
    """Draws what becomes of an episode. The source is the process's own: the same task may fail and then not fail."""

    def __init__(self, shares: dict[str, float], ledger: str, seed: int) -> None:
        self._chance = random.Random(seed)
        self._kinds = [*shares, ""]
        self._shares = [*shares.values(), 1 - sum(shares.values())]
        self._ledger = Ledger(Path(ledger))

    def draw(self) -> str:
        """A kind, or nothing."""
        return self._chance.choices(self._kinds, self._shares)[0]

    def inject(self, kind: str, trace_id: str) -> None:
        """It happens now."""
        self._ledger.write(kind, trace_id)


@functools.cache
def of_environment(ledger: str, seed: int) -> Faults:
    """The one of this process."""
    return Faults(ENVIRONMENT, ledger, seed)


@functools.cache
def of_sandbox(ledger: str, seed: int) -> Faults:
    """The one of this process, for episodes that their environment has not failed."""
    reached = 1 - sum(ENVIRONMENT.values())
    return Faults({kind: share / reached for kind, share in SANDBOX.items()}, ledger, seed)
