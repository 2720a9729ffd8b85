"""Keeps a pool of cells ready, each for one program, and clears up after them.

The service gets a door to each cell, and says by a cell's number that it is done with it: then the keeper makes sure
that nothing is left of it, and starts another. The service's end, by kill -9 too, is the end of all. Programs and what
they write pass the keeper by, so that its forks hold nothing of other runs.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from rollfarm.sandbox.inside import cell, confine, landlock, traces
from rollfarm.sandbox.inside.program import Walls

NUMBER = struct.Struct("!I")
"""Of a cell: with its door to the service, and back when the service is done with it."""

GRACE_SECONDS = 3.0
"""How long cells may take to end by themselves when the service is gone."""


class Keeper:
    """The cells of one service. The plan has `workers`, and the `command` of a cell or what `landlock` allows."""

    def __init__(self, plan: dict[str, Any], control: socket.socket) -> None:
        self._plan = plan
        self._control = control
        self._pids: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._latest = 0
        self._first_user = traces.first_user()
        self._root = traces.own_folder() if "landlock" in plan else ""

    def run(self) -> None:
        """Until the service is gone."""
        confine.prctl(confine.CHILD_SUBREAPER, 1)
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(woken, selectors.EVENT_READ)
        selector.register(self._control, selectors.EVENT_READ)
        for _ in range(self._plan["workers"]):
            self._start()
        while True:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, 4096)
                    self._reap()
                    continue
                done = self._read()
                if done is None:
                    return self._end()
                self._kill(done)
                self._start()

    def _read(self) -> int | None:
        """The cell that the service is done with; None if the service is gone."""
        try:
            message = self._control.recv(NUMBER.size)
        except ConnectionError:
            return None  # it went without reading all
        return NUMBER.unpack(message)[0] if message else None

    def _start(self) -> None:
        self._latest += 1
        number, uid = self._latest, self._user(self._latest)
        ours, theirs = socket.socketpair()
        if self._root:
            pid = os.fork()
            if pid == 0:
                theirs.close()
                self._be_cell(ours, self._folder(number), uid)
        else:
            command = [*self._plan["command"], "" if uid is None else str(uid)]
            doors = [(os.POSIX_SPAWN_DUP2, ours.fileno(), 0)]
            pid = os.posix_spawn(command[0], command, os.environ, file_actions=doors, setsid=True)
        self._pids[number], self._numbers[pid] = pid, number
        ours.close()
        try:
            socket.send_fds(self._control, [NUMBER.pack(number)], [theirs.fileno()])
        except OSError:
            pass  # the service is gone, and run() sees it next
        theirs.close()

    def _be_cell(self, door: socket.socket, folder: str, uid: int | None) -> NoReturn:
        """This fork becomes a cell, and later its fork the program.

        Should the keeper be killed, the cell goes on until the service closes its door, and then clears up.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.setsid()
        os.mkdir(folder, 0o700)
        rules = landlock.Rules()
        for path in self._plan["landlock"]["readable"]:
            rules.allow(path, landlock.READ)
        for path in self._plan["landlock"]["devices"]:
            rules.allow(path, landlock.DEVICE)
        rules.allow_all(folder)
        if uid is None:
            confine.prctl(confine.NO_NEW_PRIVS, 1)
            landlock.enter_signal_domain()
        else:
            os.chown(folder, uid, uid)
        walls, scan = Walls(folder, uid, rules), traces.Scan(folder)
        cell.serve(door.fileno(), door.fileno(), walls, scan.usage, lambda: traces.end_all(uid))

    def _kill(self, number: int) -> None:
        """The cell has answered and ends, or never will."""
        if number in self._pids:
            os.kill(self._pids[number], signal.SIGKILL)

    def _reap(self) -> None:
        while self._numbers:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._numbers.pop(pid, None)
            if number is not None:
                del self._pids[number]
            if self._root:
                self._clear(number)

    def _clear(self, number: int | None) -> None:
        """Remove what is left of the cell; without a number a stranger ended, who may have left others."""
        uid = number and self._user(number)
        if uid:
            traces.end_user(uid)
        traces.end_strangers(set(self._numbers))
        if number:
            traces.remove(self._folder(number))

    def _user(self, number: int) -> int | None:
        return None if self._first_user is None else self._first_user + number % traces.USERS

    def _folder(self, number: int) -> str:
        return f"{self._root}/{number}"

    def _end(self) -> None:
        """The doors closed with the service, at which cells end by themselves; those that do not are killed."""
        deadline = time.monotonic() + GRACE_SECONDS
        while self._numbers:
            if time.monotonic() > deadline:
                for number in self._pids:
                    self._kill(number)
            self._reap()
            time.sleep(0.005)
        if self._root:
            traces.remove(self._root)


def main() -> None:
    """The plan is the last argument; the service is at standard input."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    Keeper(json.loads(sys.argv[-1]), control).run()
