"""Runs an agent as a process of its own for one episode, in a new folder, on a leash.

Invariant: when `run` has returned or raised, nothing that the agent started is alive; when env_manager is killed, the
leash sees to it.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from env_manager import agent_leash
from env_manager.runners import Ran
from rollfarm.errors import AgentFailed
from rollfarm.threads import in_thread

KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
"""Variables of env_manager's that every agent finds, beside a PATH that begins with env_manager's own Python."""

READ_BYTES = 64 * 1024

STDERR_BYTES = 2000
"""Of stderr, this much is kept: its end."""

KILL_SECONDS = 10.0
"""How long the leash may take to end everything before it is killed itself."""


class ProcessRunner:
    """Starts the command anew for each episode."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], *, output_bytes: int) -> None:
        """Of `command`, a part that names a file here becomes its whole path: the agent runs elsewhere."""
        self._command = list(map(_whole_path, command))
        self._variables = {**_kept_variables(), **variables}
        self._output_bytes = output_bytes

    async def run(self, text: str, variables: Mapping[str, str], seconds: float) -> Ran:
        """What became of the agent that read `text`."""
        folder = await in_thread(lambda: tempfile.mkdtemp(prefix="rollfarm-agent-"))
        own = {"HOME": folder, "TMPDIR": folder}
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(text.encode())
                stdin.seek(0)
                async with self._started(stdin, folder, {**self._variables, **own, **variables}) as agent:
                    status = await agent.wait(seconds)
            return Ran(answer=await agent.answer, status=status, complaint=await agent.complaint)
        finally:
            in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))

    @asynccontextmanager
    async def _started(self, stdin: BinaryIO, folder: str, variables: Mapping[str, str]) -> AsyncIterator["_Agent"]:
        """A running agent; leaving ends it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", agent_leash.__file__, str(stdin.fileno()), *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(stdin.fileno(),),
            cwd=folder,
            env=variables,
        )
        agent = _Agent(process, self._output_bytes)
        try:
            agent.go()
            yield agent
        finally:
            await agent.end()


class _Agent:
    """A leash that holds an agent. What it says is read until both are gone, or they would wait for a reader."""

    def __init__(self, process: asyncio.subprocess.Process, output_bytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._hold = process.stdin
        self.answer = asyncio.create_task(_tail(process.stdout, output_bytes))
        self.complaint = asyncio.create_task(_tail(process.stderr, STDERR_BYTES))

    def go(self) -> None:
        """Let the leash start it."""
        self._hold.write(b"g")

    async def wait(self, seconds: float) -> int | None:
        """Its exit status; None when it has not ended in `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def end(self) -> None:
        """Have the leash kill whatever is left."""
        self._hold.close()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            raise AgentFailed(f"The agent could not be killed in {KILL_SECONDS:g} s.") from None


async def _tail(stream: asyncio.StreamReader, most: int) -> str:
    """The last `most` bytes of everything that comes."""
    kept = bytearray()
    while chunk := await stream.read(READ_BYTES):
        kept += chunk
        del kept[:-most]
    return kept.decode(errors="replace").strip()


def _whole_path(part: str) -> str:
    try:
        return str(Path(part).absolute()) if Path(part).is_file() else part
    except (OSError, ValueError):  # what cannot be a path
        return part


def _kept_variables() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return {**kept, "PATH": os.pathsep.join(path)}
