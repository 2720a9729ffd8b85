"""A cell runs one program, watches it, tells the service how it ended, and ends with everything that it started.

It waits, warm, for a job at its door. The program is a fork of it that gave up everything; the cell itself stays out of
its reach: another user, or the first process of a namespace, or outside its Landlock domain. It imports little, for it
starts as often as programs run.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import time

from rollfarm.sandbox.inside import confine, frames
from rollfarm.sandbox.inside.program import Walls, become

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Usage = Callable[[int], int]
    """Bytes of files that the run holds; counting may stop at the argument."""

TICK_SECONDS = 0.02
"""How often memory and files are looked at."""

CHUNK = 1 << 16
INODE_BYTES = 1 << 10
"""What a file counts beside its contents, so that empty ones are not free."""

OUT_OF_CPU_TIME = -24
"""Status of a process that SIGXCPU ended; the signal module takes long to import."""


def serve(door: int, back: int, walls: Walls, usage: Usage, end_all: Callable[[], None]) -> NoReturn:
    """Run the one job that comes through `door`; answer through `back`. `end_all` kills what the program started."""
    confine.prctl(confine.DUMPABLE, 0)
    confine.prctl(confine.CHILD_SUBREAPER, 1)
    try:
        frames.send(back, frames.HELLO)
        asked = frames.receive(door)
    except OSError:
        asked = None
    if asked is None:
        os._exit(0)  # nobody needs it any more
    job, given, files = asked
    gc.freeze()
    inputs, outputs, errors, trouble = (os.pipe() for _ in range(4))
    child = os.fork()
    if child == 0:
        become(job, files, [inputs[0], outputs[1], errors[1]], trouble[1], walls)
    for end in (inputs[0], outputs[1], errors[1], trouble[1]):
        os.close(end)
    wrong = b"".join(iter(lambda: os.read(trouble[0], CHUNK), b""))
    if wrong:
        answer = frames.answer("failed", None, 0.0, b"", wrong)
    else:
        run = _Run(child, door, job["limits"], given, inputs[1], outputs[0], errors[0])
        ending, code, seconds = run.watch(usage)
        end_all()
        answer = frames.answer(ending, code, seconds, bytes(run.written[outputs[0]]), bytes(run.written[errors[0]]))
    try:
        frames.send(back, answer)
    except OSError:
        pass  # nobody waits for it any more
    os._exit(0)


class _Run:
    def __init__(
        self, child: int, door: int, limits: dict[str, Any], given: bytes, inputs: int, outputs: int, errors: int
    ) -> None:
        self.written = {outputs: bytearray(), errors: bytearray()}
        """By the end of the pipe that it came from."""
        self._child = child
        self._limits = limits
        self._given = memoryview(given)
        self._inputs = inputs
        self._door = door
        self._ended = os.pidfd_open(child)
        self._open = {outputs, errors}
        self._poll = select.poll()
        for end in (inputs, outputs, errors):
            os.set_blocking(end, False)
        for end in (outputs, errors, door, self._ended):
            self._poll.register(end, select.POLLIN)
        self._poll.register(inputs, select.POLLOUT)

    def watch(self, usage: Usage) -> tuple[str, int | None, float]:
        """How it ended, its exit code, and after how long; whatever it started may still run."""
        began = time.monotonic()
        ending = self._wait(began + self._limits["seconds"], usage)
        seconds = time.monotonic() - began
        code = None
        if ending == "exited":
            ending, code = self._status()
            self._drain()
            if self._room() < 0:
                ending, code = "output", None
        self._cut()
        return ending, code, seconds

    def _wait(self, deadline: float, usage: Usage) -> str:
        look = time.monotonic() + TICK_SECONDS
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= look:
                self._bury()
                if _memory(os.getpid()) > self._limits["memory_bytes"]:
                    return "memory"
                if usage(self._limits["file_bytes"]) > self._limits["file_bytes"]:
                    return "output"
                look = time.monotonic() + TICK_SECONDS
            for end, _ in self._poll.poll(max(0.0, min(deadline, look) - now) * 1000):
                if end == self._ended:
                    return "exited"
                if end == self._door:
                    return "killed"
                if end == self._inputs:
                    self._feed()
                else:
                    self._read(end)
            if self._room() < 0:
                return "output"

    def _bury(self) -> None:
        """Wait for orphans that ended, of which the cell is the parent now."""
        which = os.WEXITED | os.WNOHANG
        while (ended := os.waitid(os.P_ALL, 0, which | os.WNOWAIT)) and ended.si_pid != self._child:
            os.waitid(os.P_PID, ended.si_pid, which)

    def _status(self) -> tuple[str, int | None]:
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        if code >= 0:
            return "exited", code
        return ("timeout", None) if code == OUT_OF_CPU_TIME else ("killed", code)

    def _feed(self) -> None:
        try:
            self._given = self._given[os.write(self._inputs, self._given[:CHUNK]) :] if self._given else self._given
        except BlockingIOError:
            return
        except OSError:
            self._given = self._given[:0]
        if not self._given:
            self._poll.unregister(self._inputs)
            os.close(self._inputs)

    def _read(self, end: int) -> bool:
        """Whether there may be more."""
        try:
            part = os.read(end, CHUNK)
        except BlockingIOError:
            return False
        if part:
            self.written[end] += part
        else:
            self._open.remove(end)
            self._poll.unregister(end)
        return bool(part)

    def _drain(self) -> None:
        """Take what the program had written when it ended; others may hold the pipe, and write on."""
        for end in sorted(self._open):
            while self._room() >= 0 and self._read(end):
                pass

    def _room(self) -> int:
        return self._limits["output_bytes"] - sum(map(len, self.written.values()))

    def _cut(self) -> None:
        room = self._limits["output_bytes"]
        for part in self.written.values():
            del part[room:]
            room -= len(part)


def _memory(root: int) -> int:
    """Bytes that all descendants of `root` hold, pages of files apart."""
    total, open_ends = 0, _children(root)
    while open_ends:
        process = open_ends.pop()
        open_ends += _children(process)
        total += _held(process)
    return total


def _children(process: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # it ended meanwhile
    return found


def _held(process: int) -> int:
    try:
        with open(f"/proc/{process}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return 0
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields) * 1024


def main() -> NoReturn:
    """A cell in namespaces of its own, whose door is its standard input.

    Arguments: its folder; where answers go, which is 0 where the door goes both ways; and the program's user.
    """
    folder, back, user = sys.argv[-3:]
    door, back = os.dup(0), os.dup(int(back))
    for standard in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    serve(door, back, Walls(folder, int(user) if user else None, None), lambda _: _used(folder), lambda: None)


def _used(folder: str) -> int:
    """Of a file system that is the run's alone."""
    files = os.statvfs(folder)
    return (files.f_blocks - files.f_bfree) * files.f_frsize + (files.f_files - files.f_ffree) * INODE_BYTES
