"""Processes of env_manager's own, for environments that hold the interpreter for long or may take their process down.

Each is started when its environment is first asked for, is dialled like any server, and is started again when it dies.
It fails only the episodes that it played.
"""

import asyncio
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process

import structlog

from env_manager.hosts import Hosts
from env_manager.servers import HEALTH_SECONDS, Server, keep
from rollfarm import rpc
from rollfarm.config import Telemetry
from rollfarm.v1.environment_pb2 import EnvironmentHost
from rollfarm.v1.environment_pb2_grpc import EnvironmentServiceStub

log = structlog.get_logger()

FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 30.0

LONG_LIFE_SECONDS = 60.0
"""One that lived for so long is started again at once."""

START_SECONDS = 60.0
"""How long one may at least take until it says what it plays: on a busy machine the imports take some."""

END_SECONDS = 5.0
"""How long one may take to close its episodes before it is killed."""


class OwnProcess(Server):
    """A process, dialled."""

    kind = EnvironmentHost.KIND_PROCESS


class Processes:
    """Starts processes, and keeps them going."""

    def __init__(self, hosts: Hosts, *, per_environment: int, hang_seconds: float, telemetry: Telemetry) -> None:
        """One that has said nothing for `hang_seconds` is killed. They log as `telemetry` says."""
        self._hosts = hosts
        self._count = per_environment
        self._hang_seconds = hang_seconds
        self._telemetry = telemetry
        self._wanted: dict[str, None] = {}
        self._asked: asyncio.Queue[str] = asyncio.Queue()

    def want(self, environment: str) -> None:
        """See that there are processes that play it; for the first time, start them."""
        if environment not in self._wanted:
            self._wanted[environment] = None
            self._asked.put_nowait(environment)

    async def run(self) -> None:
        """Start what is wanted, and start it again when it dies, until cancelled. Then end all."""
        async with asyncio.TaskGroup() as group:
            while True:
                environment = await self._asked.get()
                for _ in range(self._count):
                    group.create_task(self._keep(environment, group))

    async def _keep(self, environment: str, group: asyncio.TaskGroup) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._live(environment, group)
            except OSError as error:  # no memory, no processes or no files are left
                log.warning("environment process not started", environment=environment, cause=str(error))
            if time.monotonic() - began >= LONG_LIFE_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _live(self, environment: str, group: asyncio.TaskGroup) -> None:
        """One life of a process."""
        with tempfile.TemporaryDirectory(prefix="rollfarm-", ignore_cleanup_errors=True) as folder:
            address = f"unix:{folder}/socket"
            process = await self._start(environment, address)
            channel = rpc.channel(address, spread=False)
            server = OwnProcess(f"process:{process.pid}", self._hosts.changed, EnvironmentServiceStub(channel))
            self._hosts.add(server)
            group.create_task(keep(server, channel, self._hosts))
            try:
                await self._wait(process, server)
            finally:
                await _end(process)

    async def _start(self, environment: str, address: str) -> Process:
        """In a session of its own, so that Ctrl-C comes to env_manager, which ends it in time."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "env_manager.process", environment, address),
            *(self._telemetry.log_format, self._telemetry.log_level),
            stdin=PIPE,
            start_new_session=True,
        )

    async def _wait(self, process: Process, server: Server) -> None:
        """Until it dies, or is killed because it hangs."""
        while True:
            patience = self._hang_seconds if server.is_described else max(START_SECONDS, self._hang_seconds)
            try:
                async with asyncio.timeout(min(HEALTH_SECONDS, self._hang_seconds)):
                    status = await process.wait()
            except TimeoutError:
                if time.monotonic() - server.well_at > patience:
                    server.leave(f"The process hung for {patience:g} s and was killed.")
                    log.warning("environment process hangs", process=server.address, episodes=server.open_count)
                    process.kill()
                continue
            if not server.gone:
                server.leave(f"The process died ({_name(status)}).")
            log.warning(
                "environment process died", process=server.address, status=_name(status), episodes=server.open_count
            )
            return


async def _end(process: Process) -> None:
    """Let it close its episodes; kill it when that takes long."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
