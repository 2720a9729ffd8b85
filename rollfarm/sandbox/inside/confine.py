"""What a process gives up before it becomes a program: its user, its limits, its privileges. All of it for good."""

from __future__ import annotations

import ctypes
import os
import resource

from rollfarm.sandbox.inside import landlock, seccomp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PDEATHSIG, DUMPABLE, NO_NEW_PRIVS, CHILD_SUBREAPER = 1, 4, 38, 36
OPEN_FILES = 256
OUT_OF_MEMORY_FIRST = "1000"

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set one of this process's flags."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def change_user(uid: int) -> None:
    """Be `uid`, and in no group but its own."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def confine(limits: dict[str, Any], uid: int | None, rules: landlock.Rules | None) -> None:
    """Give it all up; without `uid` the user stays."""
    prctl(DUMPABLE, 1)
    die_first_of_memory()
    beside = 0
    if uid is not None:
        change_user(uid)
        prctl(DUMPABLE, 1)
    elif rules is not None:
        beside = _threads_of_user()
    else:
        beside = 1  # the cell, alone with the program in a user namespace
    prctl(PDEATHSIG, 9)
    limit(limits, beside)
    prctl(NO_NEW_PRIVS, 1)
    if rules is not None:
        rules.enter()
    seccomp.enter(shares_user=uid is None and rules is not None)


def die_first_of_memory() -> None:
    """Should the machine run out of memory, this process goes and no service."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(OUT_OF_MEMORY_FIRST)
    except OSError:
        pass  # where /proc is read-only; the limits hold all the same


def limit(limits: dict[str, Any], beside: int) -> None:
    """Set the limits that the kernel keeps. The user runs `beside` other threads, which are allowed for."""
    seconds = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU, then SIGKILL for those that ignore it
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + beside),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _threads_of_user() -> int:
    count, uid = 0, os.getuid()
    for process in os.listdir("/proc"):
        try:
            if process.isdigit() and os.stat(f"/proc/{process}").st_uid == uid:
                count += len(os.listdir(f"/proc/{process}/task"))
        except OSError:
            continue
    return count
