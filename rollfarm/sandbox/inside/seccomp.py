"""The system calls that no program needs and that reach out of a sandbox: a filter that denies them for good.

Denied calls fail with EPERM, and those that are younger than this table with ENOSYS, so that libraries fall back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

MACHINES = ("x86_64", "aarch64")
"""Those that the table below has numbers for, in this order; -1 where a call does not exist."""


def _same(number: int) -> tuple[int, int]:
    return (number, number)


DENIED = {
    # Network and foreign sockets. socketpair() is looked at below.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": _same(438),
    "process_madvise": _same(440),
    "process_mrelease": _same(448),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # File systems and namespaces. clone() is looked at below.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": _same(428),
    "move_mount": _same(429),
    "fsopen": _same(430),
    "fsconfig": _same(431),
    "fsmount": _same(432),
    "fspick": _same(433),
    "mount_setattr": _same(442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "inotify_add_watch": (254, 27),
    "quotactl": (179, 60),
    "quotactl_fd": _same(443),
    # Memory that no limit counts, and objects that outlive their makers.
    "memfd_create": (319, 279),
    "memfd_secret": _same(447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # The kernel's own machinery.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": _same(425),
    "io_uring_enter": _same(426),
    "io_uring_register": _same(427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "uselib": (134, -1),
}

ABOUT_FILES = {
    "chmod": (90, -1),
    "fchmodat": (268, 53),
    "fchmodat2": _same(452),
    "chown": (92, -1),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
}
"""What Landlock does not deny: changing permissions, owners and times of files that belong to the user."""

OF_ITSELF_ALONE = {
    "prlimit64": ((302, 261), 0),
    "sched_setaffinity": ((203, 122), 0),
    "sched_setscheduler": ((144, 119), 0),
    "sched_setparam": ((142, 118), 0),
    "sched_setattr": ((314, 274), 0),
    "setpriority": ((141, 140), 1),
}
"""Calls about a process, and which argument names it: only 0, the caller itself, is allowed."""

CLONE, CLONE3, SOCKETPAIR, IOCTL = (56, 220), _same(435), (53, 199), (16, 29)
NEWEST = 462
NEW_NAMESPACES = 0x7E020000
UNIX_STREAM = (1, 1)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

ARCHITECTURES = (0xC000003E, 0xC00000B7)
X32 = 0x40000000

_LOAD, _EQUAL, _MORE, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16


def program(machine: str, denied: list[tuple[int, int]]) -> bytes:
    """The filter in the kernel's form."""
    deny, missing = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[MACHINES.index(machine)]),
        (_RETURN, 0, 0, _KILL),
    ]
    lines += [(_LOAD, 0, 0, _NUMBER), (_MORE, 0, 1, X32 - 1), (_RETURN, 0, 0, _KILL), (_MORE, 0, 1, NEWEST), missing]

    def number(numbers: tuple[int, int]) -> int:
        return numbers[MACHINES.index(machine)]

    def judge(numbers: tuple[int, int], judged: list[tuple[int, int, int, int]]) -> None:
        lines.extend([(_EQUAL, 0, len(judged), number(numbers)), *judged])

    allow = (_RETURN, 0, 0, _ALLOW)
    judge(CLONE3, [missing])
    judge(CLONE, [_argument(0), (_ANY_BIT, 0, 1, NEW_NAMESPACES), deny, allow])
    family, kind = UNIX_STREAM
    of_family = [_argument(0), (_EQUAL, 1, 0, family), deny]
    judge(SOCKETPAIR, [*of_family, _argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, kind), deny, allow])
    judge(IOCTL, [_argument(1), (_EQUAL, 1, 0, TIOCSTI), (_EQUAL, 0, 1, TIOCLINUX), deny, allow])
    for numbers, place in OF_ITSELF_ALONE.values():
        judge(numbers, [_argument(place), (_EQUAL, 1, 0, 0), deny, allow])
    for numbers in denied:
        if number(numbers) >= 0:
            judge(numbers, [deny])
    lines.append(allow)
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _argument(place: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * place)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def enter(*, shares_user: bool) -> None:
    """Deny them to this process and all that it starts, for good. It must not gain privileges any more.

    One that `shares_user` with the service cannot change what is known about files either.
    """
    code = _STRICTER if shares_user else _FILTER
    if not code:
        raise OSError(f"no filter is known for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    set_filter = 22
    if libc.prctl(set_filter, 2, ctypes.byref(_Program(len(code) // 8, code)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


_FILTER = _STRICTER = b""
if os.uname().machine in MACHINES:
    _FILTER = program(os.uname().machine, [*DENIED.values()])
    _STRICTER = program(os.uname().machine, [*DENIED.values(), *ABOUT_FILES.values()])
