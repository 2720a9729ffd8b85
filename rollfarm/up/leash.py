"""Runs Valkey, which is not ours, and ends it when the supervisor goes: `leash DATA SOCKET`.

Services watch their stdin themselves; this does it for a program that does not.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path


def hold(command: Sequence[str]) -> int:
    """Run `command` until it ends, SIGTERM comes or stdin closes; its exit status is the answer.

    It inherits the farm's claims, so that they outlive even us.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    threading.Thread(target=_when_stdin_ends, args=(end,), daemon=True).start()
    return child.wait()


def _when_stdin_ends(end: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    end()


def main(data: str, socket: str) -> int:
    from rollfarm.valkey import valkey_command

    status = hold(valkey_command(Path(data), Path(socket)))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
