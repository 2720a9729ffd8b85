"""Runs programs at the level that this machine has; `shared()` is the one that a whole service uses."""

import atexit
import functools

import structlog

from rollfarm.errors import InvalidArgument, SandboxUnavailable
from rollfarm.sandbox.cells import Cells
from rollfarm.sandbox.config import SandboxConfig
from rollfarm.sandbox.containers import Containers
from rollfarm.sandbox.levels import NUMBERS, Chosen, Missing, choose
from rollfarm.sandbox.program import Finished, Limits, Program
from rollfarm.v1 import trajectory_pb2

log = structlog.get_logger()


class Sandbox:
    """Runs programs that nobody vouches for. Its cells start with the first one."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config or SandboxConfig()
        self._cells: Cells | Containers | None = None

    @property
    def limits(self) -> Limits:
        """Of programs that bring none of their own."""
        return self._config.limits

    @property
    def level(self) -> "trajectory_pb2.SandboxLevel.ValueType":
        """What keeps programs in here; REFUSED if nothing does. The first look takes a tenth of a second."""
        try:
            return NUMBERS[self._chosen.level]
        except SandboxUnavailable:
            return trajectory_pb2.SANDBOX_LEVEL_REFUSED

    async def run(self, program: Program, limits: Limits | None = None) -> Finished:
        """Run it, alone in a sandbox of its own, as soon as one is free.

        Raises SandboxUnavailable when this machine has none, and SandboxFailed when the sandbox is at fault. Cancelling
        ends the program.
        """
        limits = limits or self.limits
        if limits.file_bytes > self._config.limits.file_bytes:
            raise InvalidArgument(
                f"{limits.file_bytes} bytes of files were asked for, of {self._config.limits.file_bytes} at most."
            )
        return await self._open().run(program, limits)

    def close(self) -> None:
        """End what runs. The next run opens it again."""
        cells, self._cells = self._cells, None
        if cells is not None:
            cells.close()

    def _open(self) -> Cells | Containers:
        if self._cells is not None and not self._cells.usable:
            self.close()
        if self._cells is None:
            self._cells = Containers(self._config) if self._chosen.level == "docker" else Cells(self._chosen)
            log.info("sandbox opened", level=self._chosen.level, workers=self._config.workers)
        return self._cells

    @functools.cached_property
    def _chosen(self) -> Chosen:
        try:
            return choose(self._config)
        except Missing as missing:
            raise SandboxUnavailable(f"No sandbox works here. {missing}") from None


_configured = SandboxConfig()


def configure(config: SandboxConfig) -> None:
    """Say how `shared()` is to be, once, before its first use."""
    global _configured
    _configured = config
    shared.cache_clear()


@functools.cache
def shared() -> Sandbox:
    """The one sandbox of this process, closed at its exit."""
    made = Sandbox(_configured)
    atexit.register(made.close)
    return made
