"""Runs a command that is not ours, such as Valkey, and ends it when the supervisor goes: `leash COMMAND ARG...`.

Services watch their stdin themselves; this does it for a program that does not.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable


def main(argv: list[str]) -> int:
    """Run `argv` until it ends, SIGTERM comes or stdin closes; its exit status is ours."""
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

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


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
