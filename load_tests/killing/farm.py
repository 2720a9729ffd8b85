"""The farm that is killed, in a process of its own, and the process ids of its services."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "load_tests" / "kill.toml"
RUN = "kill"

SERVICES = ("sample_buffer", "valkey", "env_manager", "trainer")
"""What is killed."""

STOP_SECONDS = 90.0


class FarmEnded(Exception):
    """The farm is over before it should be, or does not go on."""


class Farm:
    """One `rollfarm up`. Several in turn may work on one run."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self._folder = folder

    @classmethod
    async def start(
        cls, folder: Path, base_port: int, tap_port: int, steps: int, *, flags: Mapping[str, str]
    ) -> "Farm":
        """Begin the run in `folder`, or go on with it. 0 steps is without end."""
        settings = {
            **flags,
            "run.folder": str(folder),
            "run.steps": str(steps),
            "model.path": str(folder / "model"),
            "up.base_port": str(base_port),
        }
        argv = [sys.executable, "-m", "load_tests.killing.tapped", f"127.0.0.1:{tap_port}", str(CONFIG)]
        argv += [word for name, value in settings.items() for word in (f"--{name}", value)]
        with (folder / "up.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=log, cwd=ROOT
            )
        return cls(process, folder)

    def pids(self, service: str) -> list[int]:
        """Living processes of one of SERVICES."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(child.pid for child in children if _service(child) == service)

    async def finish(self, seconds: float) -> int:
        """Wait for its end. The exit status."""
        try:
            async with asyncio.timeout(seconds):
                await self.process.communicate()
        except TimeoutError:
            raise FarmEnded(f"The farm did not end in {seconds:g} s.\n{self.last_words()}") from None
        assert self.process.returncode is not None
        return self.process.returncode

    async def stop(self) -> int:
        """Ctrl-C. The exit status."""
        self.process.send_signal(signal.SIGINT)
        return await self.finish(STOP_SECONDS)

    async def end(self) -> None:
        """Leave nothing of it, however it stands."""
        if self.process.returncode is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            await self.process.wait()

    def last_words(self) -> str:
        """What its logs end with."""
        logs = [self._folder / "up.log", *sorted((self._folder / RUN / "logs").glob("*.log"))]
        tails = (log.read_text(errors="replace").splitlines()[-8:] for log in logs if log.exists())
        return "\n".join(f"--- {log.name}\n" + "\n".join(tail) for log, tail in zip(logs, tails, strict=False))


def restarts(folder: Path) -> int:
    """How often `rollfarm up` started a service again."""
    return (folder / "up.log").read_text(errors="replace").count("; starting it again")


def told_steps(folder: Path) -> tuple[int, ...]:
    """The steps that the trainer's metrics.jsonl tells of."""
    path = folder / RUN / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return tuple(line["step"] for line in lines if line["kind"] == "step")


def _service(process: psutil.Process) -> str:
    try:
        name, argv = process.name(), process.cmdline()
    except psutil.Error:
        return ""
    if name in ("valkey-server", "redis-server"):
        return "valkey"
    return argv[argv.index("-m") + 1] if "-m" in argv[:4] else ""
