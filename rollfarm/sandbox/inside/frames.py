"""How the service and a cell speak: one question, one answer.

A question is marshalled, for the cell trusts the service, and other ways of reading take long to import. An answer is
of numbers and bytes alone: the service trusts no cell.
"""

from __future__ import annotations

import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HELLO = b"\x01"
"""A cell's first byte: it is warm."""

LENGTH = struct.Struct("!I")
"""Of a question."""

ANSWER = struct.Struct("!B?idII")
"""Which of ENDINGS; whether there is an exit code, and which; seconds; sizes of stdout and stderr, which follow."""

ENDINGS = ("exited", "timeout", "memory", "output", "killed", "failed")
"""The last is no ending: the program could not be started, and stderr says why."""

PORTABLE = 2
"""A version of marshal that every Python reads."""


def question(job: dict[str, Any], given: bytes, files: Sequence[bytes]) -> bytes:
    """What the service asks: `job` of plain values, what the program reads, and the contents of its files."""
    packed = marshal.dumps((job, given, list(files)), PORTABLE)
    return LENGTH.pack(len(packed)) + packed


def receive(door: int) -> tuple[dict[str, Any], bytes, list[bytes]] | None:
    """The question; None if the service went away."""
    length = _exactly(door, LENGTH.size)
    packed = length and _exactly(door, LENGTH.unpack(length)[0])
    return marshal.loads(packed) if packed else None


def answer(ending: str, code: int | None, seconds: float, stdout: bytes, stderr: bytes) -> bytes:
    """What the cell answers."""
    has_code = code is not None
    head = ANSWER.pack(ENDINGS.index(ending), has_code, code or 0, seconds, len(stdout), len(stderr))
    return head + stdout + stderr


def send(door: int, frame: bytes) -> None:
    """All of it. Raises OSError if the service went away."""
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(door, rest) :]


def _exactly(door: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(door, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
