"""Runs one agent and leaves nothing of it behind: `agent_leash.py FD COMMAND...`, where FD is what the agent reads.

It waits for a byte on its own stdin, and starts the agent. It ends when the agent does, or when its stdin closes,
because env_manager lets go or died. Whatever the agent started is killed then, also what left its process group. It
imports the standard library alone, so that it starts in no time.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER: whose parent dies becomes our child, and not init's. Linux has it."""

NOT_STARTED = 127
"""Exit status where the command cannot be run, as shells have it."""


def main(stdin: int, command: list[str]) -> int:
    if not os.read(0, 1):
        return NOT_STARTED
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    try:
        agent = subprocess.Popen(command, stdin=stdin, start_new_session=True)
    except OSError as error:
        print(f"cannot be started: {error}", file=sys.stderr)
        return NOT_STARTED
    threading.Thread(target=_kill_when_stdin_ends, args=(agent,), daemon=True).start()
    status = agent.wait()
    _kill_group(agent.pid)
    _kill_children()
    return status if status >= 0 else 128 - status


def _kill_when_stdin_ends(agent: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 4096):
        pass
    agent.kill()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_children() -> None:
    """Until there are none: the children of one that is killed become ours."""
    while True:
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
