"""The processes under load: a Valkey whose data lies on a disk, and a sample_buffer with its journal in it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
from redis import Redis

from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.ports import free_port
from rollfarm.valkey import valkey_answers, valkey_command

ROOT = Path(__file__).parents[2]

START_SECONDS = 300.0


@dataclass(frozen=True)
class Valkey:
    """A Valkey that answers."""

    url: str
    pid: int


@dataclass(frozen=True)
class Buffer:
    """A sample_buffer that serves."""

    address: str
    pid: int
    log: Path
    start_seconds: float
    """From the start of the process until it served."""

    def restart(self) -> "Restart":
        """What reading its journal took, by its own log."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        opened = next(line for line in lines if line["event"] == "journal open")
        rss = psutil.Process(self.pid).memory_info().rss
        return Restart(opened["events"], opened["seconds"], self.start_seconds, rss / 1e6)


@dataclass(frozen=True)
class Restart:
    """A journal was read."""

    events: int
    """Since the snapshot."""
    seconds: float
    """For reading it."""
    start_seconds: float
    """From the start of the process until it served."""
    rss_mb: float
    """Resident memory after it."""


@contextmanager
def valkey(folder: Path, appendfsync: str) -> Iterator[Valkey]:
    """The farm's own Valkey until the block ends, with its data in `folder`."""
    path = folder / "v.sock"
    command = valkey_command(folder / "data", path)
    command[command.index("--appendfsync") + 1] = appendfsync
    with serving(command, folder / "valkey.log", lambda: asyncio.run(valkey_answers(path))) as pid:
        yield Valkey(f"unix://{path}", pid)


@contextmanager
def buffer(folder: Path, journal: str, *flags: str) -> Iterator[Buffer]:
    """`python -m sample_buffer` until the block ends."""
    address = f"127.0.0.1:{free_port()}"
    path = folder / "sample_buffer.log"
    command = [sys.executable, "-m", "sample_buffer", "--sample_buffer.listen.port", address.rpartition(":")[2]]
    command += ["--sample_buffer.journal", journal, "--sample_buffer.telemetry.log_format", "json", *flags]
    began = time.monotonic()
    with serving(command, path, lambda: asyncio.run(rpc.is_serving(address, timeout=0.5))) as pid:
        yield Buffer(address, pid, path, time.monotonic() - began)


@contextmanager
def serving(command: list[str], log: Path, answers: Callable[[], bool]) -> Iterator[int]:
    """The id of the command's process, from its first answer until the block ends."""
    end = time.monotonic() + START_SECONDS
    with (
        log.open("wb") as file,
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file) as child,
    ):
        try:
            while not answers():
                if child.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} does not answer. Its log ends with:\n{log.read_text()[-2000:]}")
                time.sleep(0.02)
            yield child.pid
        finally:
            child.kill()


def commits(journal: str) -> int:
    """Scripts and transactions that the Valkey has run so far."""
    with Redis.from_url(journal) as redis:
        stats = cast(dict[str, dict[str, int]], redis.info("commandstats"))
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha", "fcall", "exec"))


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder lies on. Raises ConfigError where it is memory."""
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype
    if kind in ("tmpfs", "ramfs"):
        raise ConfigError(f"{folder} lies in memory, where nothing is durable. Choose --folder on a disk.")
    return kind


def fsync_ms(folder: Path, rounds: int = 50) -> float:
    """Median time of writing and flushing 64 KiB: what each group commit pays at least."""
    took: list[float] = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(rounds):
            file.write(b"\0" * 65536)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return sorted(took)[rounds // 2] * 1000
