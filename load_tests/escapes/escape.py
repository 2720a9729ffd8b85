"""One attempt to break out, and what all of them import."""

import textwrap
from dataclasses import dataclass, field

from rollfarm.sandbox import Limits
from rollfarm.sandbox.program import Ending

PROOF, DENIED = "PROOF", "DENIED"

MODULES = ("contextlib", "mmap", "shutil", "signal", "socket", "stat", "struct", "subprocess", "threading", "zlib")
"""What programs import as they need it: nothing is warm that few of them use."""

PRELUDE = '''
import ctypes, os, sys, time
from facts import facts

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, facts["marker"].encode(), 0, 0, 0)


class attempt:
    """Whether the block gets through without an error."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if error is None:
            print("PROOF", flush=True)
            return False
        refused = isinstance(error, (OSError, MemoryError, ValueError)) or kind.__name__ == "CalledProcessError"
        if refused:
            print("DENIED", error, flush=True)
        return refused


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def syscall(x86_64, aarch64, *arguments):
    number = x86_64 if os.uname().machine == "x86_64" else aarch64
    return check(libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]))


def expect(found):
    if not found:
        raise OSError("there was nothing")
'''
"""`attempt.py`, which is beside every program, as is `facts.py`: what the host has and no program may reach."""


@dataclass(frozen=True)
class Escape:
    """One program."""

    name: str
    """What it tries."""

    code: str
    """Python, after `from attempt import *`."""

    endings: tuple[Ending, ...] = ("exited",)
    """How the run may end."""

    says: str = DENIED
    """What it prints at least; empty where it is ended before it could."""

    control: bool = False
    """Whether it is harmless outside of a sandbox, and prints PROOF there."""

    alone: bool = False
    """Whether it takes the processes of others, where runs share a user: it runs after them."""

    limits: Limits = field(default=Limits(seconds=30.0, cpu_seconds=20))
    """Of its run."""

    @property
    def script(self) -> str:
        """The whole program."""
        imports = ["ctypes", "os", "sys", "time", *(name for name in MODULES if f"{name}." in self.code)]
        return f"import {', '.join(imports)}\nfrom attempt import *\n" + textwrap.dedent(self.code)


BRIEF = Limits(seconds=0.5)
"""Of programs that would run forever."""

SMALL = Limits(seconds=30.0, cpu_seconds=20, memory_bytes=128 * 2**20, file_bytes=8 * 2**20, output_bytes=2**16)
"""Of programs that would use everything."""
