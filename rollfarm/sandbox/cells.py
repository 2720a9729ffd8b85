"""The service's side of the cells: takes one that is warm, hands it a program, and waits for how it ended."""

import asyncio
import contextlib
import json
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rollfarm.errors import SandboxFailed
from rollfarm.sandbox.inside import frames
from rollfarm.sandbox.inside.keeper import NUMBER
from rollfarm.sandbox.levels import BOOT, Chosen
from rollfarm.sandbox.program import Finished, Limits, Program

GRACE_SECONDS = 20.0
"""How long a cell may take beyond its program's limit, on a machine that is busy."""

CLOSE_SECONDS = 5.0
"""How long the keeper may take to clear up when it is no longer needed."""


@dataclass(frozen=True)
class _Cell:
    number: int
    door: socket.socket


class Cells:
    """A keeper, and the cells that it has ready. It belongs to the event loop that it was made in."""

    def __init__(self, chosen: Chosen) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[_Cell | None] = asyncio.Queue()
        """None is the end: the keeper is gone."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lost = False
        plan = json.dumps(chosen.plan)
        with theirs:
            self._keeper = subprocess.Popen(
                [chosen.python, "-I", "-c", BOOT.format(module="keeper"), str(Path(__file__).parent), plan],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._receive)

    @property
    def usable(self) -> bool:
        """The keeper lives, and the running loop is that of these cells."""
        return not self._lost and self._loop is asyncio.get_running_loop()

    async def run(self, program: Program, limits: Limits) -> Finished:
        """How `program` ended. Raises SandboxFailed when its cell did not say."""
        cell = await self._take()
        try:
            async with asyncio.timeout(limits.seconds + GRACE_SECONDS):
                return await self._ask(cell.door, program, limits)
        except TimeoutError:
            raise SandboxFailed(f"A sandbox was silent for {GRACE_SECONDS:g} s after its program's time.") from None
        except (OSError, EOFError) as error:
            raise SandboxFailed(f"A sandbox went away ({error or type(error).__name__}).") from None
        finally:
            cell.door.close()
            with contextlib.suppress(OSError):
                self._control.send(NUMBER.pack(cell.number))

    def close(self) -> None:
        """End every cell, and wait until nothing is left of them."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._lost = True
        self._control.close()
        while not self._ready.empty():
            if cell := self._ready.get_nowait():
                cell.door.close()
        try:
            self._keeper.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    async def _take(self) -> _Cell:
        cell = await self._ready.get()
        if cell is None:
            self._ready.put_nowait(None)  # for whoever else waits
            raise SandboxFailed("The keeper of the sandboxes ended.")
        return cell

    def _receive(self) -> None:
        try:
            message, doors, _, _ = socket.recv_fds(self._control, NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            message, doors = b"", []
        if not doors:
            self._loop.remove_reader(self._control)
            self._lost = True
            self._ready.put_nowait(None)
            return
        door = socket.socket(fileno=doors[0])
        door.setblocking(False)
        self._ready.put_nowait(_Cell(NUMBER.unpack(message)[0], door))

    async def _ask(self, door: socket.socket, program: Program, limits: Limits) -> Finished:
        await self._exactly(door, len(frames.HELLO))
        await self._loop.sock_sendall(door, question(program, limits))
        return await self._answer(door)

    async def _answer(self, door: socket.socket) -> Finished:
        head = await self._exactly(door, frames.ANSWER.size)
        stdout, stderr = [await self._exactly(door, size) for size in frames.ANSWER.unpack(head)[-2:]]
        return finished(head, stdout, stderr)

    async def _exactly(self, door: socket.socket, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = await self._loop.sock_recv(door, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def question(program: Program, limits: Limits) -> bytes:
    """What a cell is asked."""
    job = {"command": list(program.command), "files": list(program.files), "limits": limits.model_dump()}
    return frames.question(job, _bytes(program.stdin), [_bytes(content) for content in program.files.values()])


def finished(head: bytes, stdout: bytes, stderr: bytes) -> Finished:
    """What a cell's answer says. Raises SandboxFailed if that is that it failed."""
    number, has_code, code, seconds, *_ = frames.ANSWER.unpack(head)
    ending = frames.ENDINGS[number]
    if ending == "failed":
        raise SandboxFailed(f"A sandbox could not start its program: {text(stderr)}.")
    return Finished(ending, code if has_code else None, text(stdout), text(stderr), seconds)


def text(written: bytes) -> str:
    """What a program wrote, as it is shown."""
    return written.decode(errors="replace")


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
