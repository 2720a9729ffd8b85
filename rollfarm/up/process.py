"""One process of the farm, with everything that it starts: a session of its own, a log file, and no leftovers."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from rollfarm.up.farm import ProcessSpec

TAIL_LINES = 25


class State(StrEnum):
    """What a process is doing, in the word that people read."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class ProcessFailed(Exception):
    """A process ended in a way that a restart does not mend."""

    def __init__(self, problem: str, *, name: str, status: int, log: Path, tail: str) -> None:
        self.name = name
        self.status = status if status > 0 else 1
        """What the command exits with."""
        self.log = log
        self.tail = tail
        super().__init__(problem)


class Child:
    """A process that may be started many times, one at a time."""

    def __init__(self, spec: ProcessSpec, logs: Path) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.state = State.WAITING
        self.restarts = 0
        self.since = time.monotonic()
        """When the state began, monotonic seconds."""
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Its process id, while it lives."""
        return self._process.pid if self.alive and self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def status(self) -> int | None:
        """Exit status of the last run; negative is a signal's number."""
        return self._process.returncode if self._process else None

    def enter(self, state: State) -> None:
        """Note the state and when it began."""
        self.state = state
        self.since = time.monotonic()

    async def spawn(self, stdin: int, claims: Sequence[int]) -> None:
        """Start it: never by fork, so that threads and gRPC of ours cannot harm it.

        `claims` are descriptors that it inherits.
        """
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            log.write(f"--- {' '.join(self.spec.argv)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.env},
                start_new_session=True,
                pass_fds=claims,
            )

    async def exit(self) -> int:
        """Wait for its end, then end whatever it left in its process group."""
        assert self._process is not None
        status = await self._process.wait()
        self.kill()
        return status

    def terminate(self) -> None:
        """Ask it to drain."""
        if self.alive and self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End its whole process group now."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The last lines that this run of it logged."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[1:]
        return "\n".join(lines[-TAIL_LINES:])

    def failed(self, problem: str) -> ProcessFailed:
        """The error that ends the farm on its account."""
        self.enter(State.FAILED)
        return ProcessFailed(problem, name=self.name, status=self.status or 1, log=self.log, tail=self.tail())


def describe_status(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
