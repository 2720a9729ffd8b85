"""Environments that take their process down. Alone in a file, which a process imports in no time."""

import os
import signal
import time

from rollfarm.env import Action, Environment, Step


class Deadly(Environment):
    """Tells its process, or takes it down."""

    runs = "process"

    def reset(self, seed: int, index: int) -> str:
        return str(os.getpid())

    def step(self, action: Action) -> Step:
        if action == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)
        return Step(action)
