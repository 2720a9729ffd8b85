"""Landlock: files that a process and all that it starts can reach, by path, for good. No privilege is needed.

What a rule does not allow is denied. What the kernel's version does not know (moving files between folders before 2,
truncating before 3, sockets before 4, signals before 6) is for seccomp and the user id to deny.
"""

from __future__ import annotations

import ctypes
import os
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHARACTER_DEVICE, MAKE_SOCKET, MAKE_BLOCK_DEVICE = 1 << 6, 1 << 9, 1 << 11
TRUNCATE = 1 << 14
KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Every right over files, by the version that completed it."""

READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE | TRUNCATE
OF_FILES = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
NEVER = MAKE_CHARACTER_DEVICE | MAKE_BLOCK_DEVICE | MAKE_SOCKET
TCP = 0b11
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
SIGNALS_SINCE = 6

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's; 0 without Landlock."""
    return max(0, _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def rights() -> int:
    """Every right that this kernel can deny."""
    return max(bits for since, bits in KNOWN.items() if since <= version())


class Rules:
    """What may be reached, once it is entered."""

    def __init__(self) -> None:
        """Nothing."""
        sockets, scoped = version() >= 4, version() >= SIGNALS_SINCE
        self._rights = rights()
        self.ruleset = _create(
            self._rights, TCP if sockets else 0, ABSTRACT_SOCKETS_AND_SIGNALS if scoped else 0, scoped, sockets
        )

    def allow(self, path: str | int, allowed: int) -> None:
        """`allowed` on what is at `path`, or open as it, and all below."""
        place = path if isinstance(path, int) else os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(f"/proc/self/fd/{place}" if isinstance(path, int) else path):
            allowed &= OF_FILES
        rule = struct.pack("=Qi", allowed & self._rights, place)
        _check(_libc.syscall(ADD_RULE, self.ruleset, PATH_BENEATH, rule, 0), "landlock_add_rule")
        if not isinstance(path, int):
            os.close(place)

    def allow_all(self, folder: str) -> None:
        """Everything in `folder`, except making devices and sockets."""
        self.allow(folder, self._rights & ~NEVER)

    def enter(self) -> None:
        """Keep to them, for good. This process must not gain privileges any more."""
        _check(_libc.syscall(RESTRICT_SELF, self.ruleset, 0), "landlock_restrict_self")
        os.close(self.ruleset)


def enter_signal_domain() -> None:
    """Send signals to what this process starts from now on, and to nobody else, ever."""
    ruleset = _create(0, 0, ABSTRACT_SOCKETS_AND_SIGNALS, True, True)
    _check(_libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _create(files: int, sockets: int, scopes: int, scoped: bool, networked: bool) -> int:
    fields = [files, sockets, scopes][: 3 if scoped else 2 if networked else 1]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    return _check(
        _libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)),
        "landlock_create_ruleset",
    )


def _check(result: int, call: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
    return result
