"""A process for the supervisor's tests; `child.py KIND ...` does one thing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(kind: str, *arguments: str) -> None:
    if kind == "sleep":
        time.sleep(60)
    elif kind == "exit":
        print("the reason is in the log")
        sys.exit(int(arguments[0]))
    elif kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(arguments[0], os.getpid())
        time.sleep(60)
    elif kind == "parent":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note(arguments[0], grandchild.pid)
        time.sleep(60)
    elif kind == "touch":
        note(arguments[0], os.getpid())
    elif kind == "drained":
        signal.signal(signal.SIGTERM, lambda *_: (note(arguments[0], arguments[1]), sys.exit(0)))
        time.sleep(60)
    elif kind == "serve":
        serve(int(arguments[0]))


def serve(port: int) -> None:
    from rollfarm import service
    from rollfarm.config import Listen

    listen = Listen(port=port, drain_seconds=1)
    service.run(lambda: service.serve(lambda server: None, listen, services=[]))


def note(path: str, what: object) -> None:
    with Path(path).open("a") as file:
        file.write(f"{what}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
