"""Runs a program against tests in the sandbox. What each run gives is why the test was not passed, or nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reward_gateway.rewards import code_inside
from rollfarm import sandbox
from rollfarm.sandbox import PYTHON, Finished, Limits, Program

_INSIDE = Path(code_inside.__file__).read_text()

_START_SECONDS = 5.0
"""Of a run, beside its tests: to start a second Python, and to import the program."""


@dataclass(frozen=True)
class Bounds:
    """What the tests of one program may cost."""

    seconds: float
    """Of each test."""

    most_seconds: float
    """Of all of them; those that are left then are not run."""

    memory_bytes: int
    """Of the program."""

    partial: bool
    """Whether to go on after a test that was not passed."""

    def limits(self, seconds: float) -> Limits:
        """Of a run of so long; processes, output and files are as the sandbox's table says."""
        own = {"seconds": seconds, "cpu_seconds": int(seconds) + 1, "memory_bytes": self.memory_bytes}
        return sandbox.shared().limits.model_copy(update=own)


async def by_output(source: str, inputs: Sequence[str], outputs: Sequence[str], bounds: Bounds) -> list[str]:
    """Run it once for each input. What is expected never enters the sandbox."""
    faults: list[str] = []
    spent = 0.0
    for given, wanted in zip(inputs, outputs, strict=True):
        if spent >= bounds.most_seconds or (faults and faults[-1] and not bounds.partial):
            faults.append("not run")
            continue
        program = Program(files={"main.py": source}, command=[PYTHON, "main.py"], stdin=given)
        finished = await sandbox.shared().run(program, bounds.limits(bounds.seconds))
        spent += finished.seconds
        faults.append(_fault(finished) or ("" if _lines(finished.stdout) == _lines(wanted) else "wrong output"))
    return faults


async def by_asserts(source: str, setup: str, asserts: Sequence[str], bounds: Bounds) -> list[str]:
    """Run them all in one sandbox, in a process apart from the program's. Raises ValueError for a broken one."""
    question = {
        "source": source,
        "setup": setup,
        "tests": asserts,
        "seconds": bounds.seconds,
        "partial": bounds.partial,
    }
    program = Program(files={"tests.py": _INSIDE}, command=[PYTHON, "tests.py"], stdin=json.dumps(question) + "\n")
    finished = await sandbox.shared().run(program, bounds.limits(bounds.most_seconds + _START_SECONDS))
    lines = finished.stdout.split("\n")[:-1]
    if lines[:1] != [code_inside.READY]:
        raise RuntimeError(f"the tests did not start: {finished.stderr[-500:]}")
    faults = [_verdict(line) for line in lines[1:]]
    return faults + [_fault(finished) or "not run"] * (len(asserts) - len(faults))


def _verdict(line: str) -> str:
    passed, why = json.loads(line)
    if passed == code_inside.BROKEN:
        raise ValueError(f"a test of the reference cannot be run: {why}")
    return "" if passed else why or "not passed"


def _fault(finished: Finished) -> str:
    """Why the program itself is at fault."""
    if finished.succeeded:
        return ""
    if finished.ending != "exited":
        return f"ended by {finished.ending}"
    last = finished.stderr.strip().splitlines() or [""]
    return f"exited with {finished.exit_code}: {last[-1]}"[:300]


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
