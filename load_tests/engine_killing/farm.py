"""The processes: engine hosts that simulate, and one llm_proxy that reaches them through taps."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

from rollfarm import rpc
from rollfarm.ports import free_port

ROOT = Path(__file__).parents[2]

START_SECONDS = 120.0


class FarmEnded(Exception):
    """A process is gone that nobody killed, or the farm does not go on."""


class Engine:
    """One engine host, at one address for as long as the farm lives."""

    def __init__(self, number: int, folder: Path, flags: dict[str, str]) -> None:
        self.number = number
        self._port = free_port()
        self._flags = {"engine.adapter": "simulated", "engine.listen.port": str(self._port), **flags}
        self._log = folder / f"engine-{number}.log"
        self._process: Process
        self._was_killed = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Begin the process; another is gone."""
        self._process = await _start("llm_proxy.engine", self._flags, self._log)
        self._was_killed = False

    async def kill(self) -> None:
        """SIGKILL, and the end of the process."""
        self._was_killed = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def hang(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def ended(self) -> str:
        """What its log ends with, if it ended by itself."""
        return "" if self._was_killed or self._process.returncode is None else _tail(self._log)


class Proxy:
    """The llm_proxy."""

    def __init__(self, folder: Path, engines: list[str], flags: dict[str, str]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        port = self.address.rpartition(":")[2]
        self._flags = {"llm_proxy.listen.port": port, "llm_proxy.engines": json.dumps(engines), **flags}
        self._log = folder / "llm_proxy.log"
        self._process: Process

    async def start(self) -> None:
        """Return when it serves. Raises FarmEnded."""
        self._process = await _start("llm_proxy", self._flags, self._log)
        async with asyncio.timeout(START_SECONDS):
            while not await rpc.is_serving(self.address, timeout=1.0):
                if self.ended:
                    raise FarmEnded(f"llm_proxy ended with:\n{self.ended}")
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """SIGKILL, and the end of the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    @property
    def ended(self) -> str:
        """What its log ends with, if it ended by itself."""
        return "" if self._process.returncode is None else _tail(self._log)


async def _start(module: str, flags: dict[str, str], log: Path) -> Process:
    argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *argv, stdin=DEVNULL, stdout=file, stderr=file, cwd=ROOT
        )


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:]) or "(an empty log)"
