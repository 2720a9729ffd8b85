"""A reward of 0, for which a program is run in the sandbox now and then; and sandboxes that fail, none by a mock.

A program whose files cannot be written makes the sandbox say that it could not start it. A cell that is killed leaves
without a word, and one that is stopped says nothing until the reward's time is up.
"""

import asyncio
import contextlib
import os
import random
import signal
import time

import psutil

from load_tests.failing import injections
from rollfarm import sandbox, telemetry
from rollfarm.reward import Episode
from rollfarm.sandbox import PYTHON, Program

SECONDS = 4.0
"""What the reward is given."""

SIGNALS = {"cell killed": signal.SIGKILL, "cell stopped": signal.SIGSTOP}

SOUND = Program({"main.py": "print(6 * 7)"}, [PYTHON, "main.py"])
UNWRITABLE = Program({"main.py": "", "main.py/main.py": ""}, [PYTHON, "main.py"])


async def program(episode: Episode, *, ledger: str = "", seed: int = 0) -> float:
    """0. Injections are written to the file `ledger`; without one nothing is made to fail."""
    faults = injections.of_sandbox(ledger, seed) if ledger else None
    fault = faults.draw() if faults else ""
    trace_id = telemetry.trace_id.get()
    if faults and fault == "cannot start":
        faults.inject(fault, trace_id)
        await sandbox.shared().run(UNWRITABLE)
    elif faults and fault:
        await _struck(fault, trace_id, faults)
    elif random.random() < injections.SOUND_SHARE:
        finished = await sandbox.shared().run(SOUND)
        if finished.stdout != "42\n":
            raise RuntimeError(f"the sandbox gave {finished}")
    return 0.0


async def _struck(fault: str, trace_id: str, faults: injections.Faults) -> None:
    """Run a program that waits, and give its cell a signal meanwhile."""
    waiting = Program({}, ["sh", "-c", f"sleep 60; : {trace_id}"])
    running = asyncio.ensure_future(sandbox.shared().run(waiting))
    try:
        cell = await asyncio.to_thread(_cell_of, trace_id)
        faults.inject(fault, trace_id)
        os.kill(cell, SIGNALS[fault])
        await running
    finally:
        running.cancel()


def _cell_of(word: str) -> int:
    """The process that watches over the program whose command holds `word`, once it runs."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                match process.cmdline():
                    case ["sh", *_, script] if word in script:
                        return process.ppid()
                    case _:
                        pass
        time.sleep(0.03)
    raise TimeoutError(f"No program was started in {SECONDS:g} s.")
