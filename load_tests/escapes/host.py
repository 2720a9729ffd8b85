"""What the suite's programs try to reach, sockets, files and processes, and what became of it afterwards."""

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from load_tests.escapes.escape import PRELUDE, PROOF, Escape
from rollfarm import sandbox
from rollfarm.sandbox import PYTHON, Finished, Program, Sandbox

SECRET = "ROLLFARM_ESCAPE_SECRET"
NOBODY = 65534
"""Who owns the bait, where root runs the suite; some of it runs as this user."""

GONE_SECONDS = 5.0
"""How long what a run started may take to be gone after it."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt went."""

    finished: Finished
    """The run."""

    left: list[int]
    """Processes of it that were there afterwards."""

    def escaped_from(self, escape: Escape) -> bool:
        """The act succeeded, or something stayed, or the run was not ended as it has to be."""
        return PROOF in self.finished.stdout or bool(self.left) or self.finished.ending not in escape.endings


class Host:
    """The bait. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="escapes-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.chmod(0o777)
        for name in ("file", "writable"):
            (self.folder / name).write_text("bait")
            (self.folder / name).chmod(0o666)
            if os.getuid() == 0:
                os.chown(self.folder / name, NOBODY, NOBODY)
        self.secret = secrets.token_hex(8)
        os.environ[SECRET] = self.secret
        self._stack.callback(os.environ.pop, SECRET, None)
        self.abstract = f"escapes-{secrets.token_hex(4)}"
        self._tcp = self._listening(socket.AF_INET, ("127.0.0.1", 0))
        self._udp = self._bound(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self._listening(socket.AF_UNIX, str(self.folder / "socket"))
        self._listening(socket.AF_UNIX, "\0" + self.abstract)
        self.datagrams = self._bound(socket.AF_UNIX, socket.SOCK_DGRAM, str(self.folder / "datagrams"))
        (self.folder / "socket").chmod(0o777)
        (self.folder / "datagrams").chmod(0o777)
        self.victim = subprocess.Popen(["sleep", "600"])
        self._stack.callback(self.victim.wait)
        self._stack.callback(self.victim.kill)

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def files(self, escape: Escape, marker: str) -> dict[str, str]:
        """What lies in an attempt's folder."""
        facts = {
            "marker": marker,
            "secret": self.secret,
            "service": os.getpid(),
            "victim": self.victim.pid,
            "tcp_port": self._tcp.getsockname()[1],
            "udp_port": self._udp.getsockname()[1],
            "unix_socket": str(self.folder / "socket"),
            "datagram_socket": str(self.folder / "datagrams"),
            "abstract_socket": self.abstract,
            "folder": str(self.folder),
            "home": str(self.folder),
            "file": str(self.folder / "file"),
            "writable": str(self.folder / "writable"),
            "users": Path("/etc/passwd").read_text(),
            "shared": self.abstract,
            "source": str(Path(sandbox.__file__)),
        }
        return {"main.py": escape.script, "attempt.py": PRELUDE, "facts.py": f"facts = {facts!r}"}

    async def attempt(self, escape: Escape, where: Sandbox) -> Outcome:
        """Let it try."""
        marker = _marker()
        program = Program(self.files(escape, marker), [PYTHON, "main.py"])
        finished = await where.run(program, escape.limits)
        return Outcome(finished, await left(marker))

    async def attempt_all(self, escapes: Sequence[Escape], where: Sandbox) -> dict[str, Outcome]:
        """Let them try, at the same time as far as they may."""
        together = [escape for escape in escapes if not escape.alone]
        outcomes = await asyncio.gather(*[self.attempt(escape, where) for escape in together])
        found = {escape.name: outcome for escape, outcome in zip(together, outcomes, strict=True)}
        for escape in escapes:
            if escape.alone:
                found[escape.name] = await self.attempt(escape, where)
        return found

    def attempt_plainly(self, escape: Escape) -> str:
        """What it prints with nothing around it."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.files(escape, _marker()).items():
                (Path(folder) / name).write_text(text)
            command = [sys.executable, "main.py"]
            return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60).stdout

    def harm(self) -> list[str]:
        """What the attempts did to the bait."""
        return [
            what
            for what, done in (
                ("the victim was killed", self.victim.poll() is not None),
                ("a file was changed", (self.folder / "file").read_text() != "bait"),
                ("a file was removed", not (self.folder / "writable").exists()),
                ("a file was truncated", not (self.folder / "writable").read_text()),
                ("permissions were changed", (self.folder / "file").stat().st_mode & 0o777 != 0o666),
                ("a file was written", (self.folder / "written").exists()),
                ("shared memory was written", Path("/dev/shm", self.abstract).exists()),
                ("a time bomb exploded", (self.folder / "exploded").exists()),
            )
            if done
        ]

    def _bound(self, family: int, kind: int, address: str | tuple[str, int]) -> socket.socket:
        bound = self._stack.enter_context(socket.socket(family, kind))
        bound.bind(address)
        return bound

    def _listening(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        bound = self._bound(family, socket.SOCK_STREAM, address)
        bound.listen(100)
        return bound


async def left(marker: str) -> list[int]:
    """Processes that bear `marker`, once there are none or they had time to go."""
    deadline = time.monotonic() + GONE_SECONDS
    while (found := marked(marker)) and time.monotonic() < deadline:  # noqa: ASYNC110 (nobody tells of it)
        await asyncio.sleep(0.05)
    return found


def marked(marker: str) -> list[int]:
    """Processes that bear `marker` now."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "comm").read_text().strip() == marker:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _marker() -> str:
    return "esc" + secrets.token_hex(6)
