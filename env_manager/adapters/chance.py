"""Random numbers of an episode's own, for worlds that draw from the process's.

Many packages seed `random` and `numpy.random` at reset and go on drawing from them. Two episodes in one process would
take each other's numbers, and equal seeds would not give equal episodes. So each call is made with the episode's own
state put in, and one call at a time: a world that does this runs in a process that has only such worlds.
"""

import random
import threading
from typing import Any

import numpy

_LENT = threading.Lock()


class Chance:
    """The state of one episode. `with chance:` puts it in, and takes it out again as the call left it."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = numpy.random.RandomState(seed).get_state()
        self._before: Any = None

    def __enter__(self) -> None:
        _LENT.acquire()
        self._before = random.getstate(), numpy.random.get_state()
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)

    def __exit__(self, *error: object) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        random.setstate(self._before[0])
        numpy.random.set_state(self._before[1])
        _LENT.release()
