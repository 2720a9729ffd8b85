"""What runs leave on the machine where they have no namespaces of their own, and how it goes away."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import tempfile

from rollfarm.sandbox.inside.cell import INODE_BYTES
from rollfarm.sandbox.inside.confine import change_user

PREFIX = "rollfarm-sandbox-"
USERS = 1 << 14
MANY_USERS, FEW_USERS = 0x70000000, 20_000
"""Where unique users begin: out of the way of systemd's and of containers', or of people's where there are few."""
BLOCKS = 1 << 10


def first_user() -> int | None:
    """The first of `USERS` users that nobody else has; None if this process cannot be another user."""
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        known = max(int(first) + int(count) for first, _, count in map(str.split, file))
    if known >= MANY_USERS + BLOCKS * USERS:
        return MANY_USERS + random.SystemRandom().randrange(BLOCKS) * USERS
    return FEW_USERS


def own_folder() -> str:
    """A new one, kept locked; those of keepers that were killed are removed."""
    parent = tempfile.gettempdir()
    for entry in os.scandir(parent):
        if entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
            stale = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(stale, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry.path)
            except BlockingIOError:
                pass  # its keeper lives
            finally:
                os.close(stale)
    own = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    os.chmod(own, 0o711)
    fcntl.flock(os.open(own, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
    return own


def remove(folder: str) -> None:
    """Remove it, however deep, and whatever permissions a program gave to what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def end_all(uid: int | None) -> None:
    """Kill what a cell's program started, and wait for it: all of `uid`, or of the cell's Landlock domain."""
    if uid is None:
        os.kill(-1, signal.SIGKILL)
    else:
        end_user(uid)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def end_user(uid: int) -> None:
    """Kill every process of `uid`. One signal to all leaves no moment in which one of them could fork."""
    killer = os.fork()
    if killer == 0:
        try:
            change_user(uid)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has none
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def end_strangers(known: set[int]) -> None:
    """Kill the children that are none of `known`: orphans of a cell that was killed."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        for child in set(map(int, file.read().split())) - known:
            os.kill(child, signal.SIGKILL)


class Scan:
    """What the files of a folder hold, looked at every few times only, since it takes its time."""

    EVERY = 5

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._asked = 0
        self._found = 0

    def usage(self, enough: int) -> int:
        """In bytes, as of the latest look. It goes no further than `enough`: files may come faster than it counts."""
        self._asked += 1
        if self._asked % self.EVERY == 0:
            self._found = _size(self._folder, enough)
        return self._found


def _size(folder: str, enough: int) -> int:
    total, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if total > enough:
                        return total
                    total += entry.stat(follow_symlinks=False).st_blocks * 512 + INODE_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            pass  # it went away meanwhile
        except OSError:
            return enough + 1  # no honest program hides its files
    return total
