"""How long a reward may take: what it took lately, and half as much again.

    timeout = min(max(least, factor * anchor), most),  anchor = the longest of the latest `window` successes

as RollPacker (arXiv 2509.21009) bounds the workers of its rewards: 2 s, 1.5 and 30 s. So a reward that hangs is given
up in seconds, and one that is slow by nature keeps its time. Two things are ours: before the first success the anchor
is unknown and `most` is given; and each one in a row that is late doubles the time of the next, so that a reward that
has become slow for good succeeds again.
"""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from rollfarm.errors import RewardFailed


class Late(RewardFailed):
    """The reward gave no score in time."""


class Timeout:
    """Of one reward of one domain. Invariant: it is within [min(least, most), most] at any time."""

    def __init__(self, *, least: float, factor: float, most: float, window: int) -> None:
        self._least = least
        self._factor = factor
        self._most = most
        self._successes: deque[float] = deque(maxlen=window)
        self._late = 0

    def seconds(self) -> float:
        """What the next attempt is given."""
        if not self._successes:
            return self._most
        usual = max(self._least, self._factor * max(self._successes))
        return min(usual * 2.0 ** min(self._late, 64), self._most)

    def succeeded(self, seconds: float) -> None:
        """An attempt took so long."""
        self._successes.append(seconds)
        self._late = 0

    def late(self) -> None:
        """An attempt was given up."""
        self._late += 1


@contextmanager
def timed(timeout: Timeout) -> Generator[float, None, None]:
    """How long what is done within may take; it is told how that ended. Other failures than Late say nothing."""
    began = time.monotonic()
    try:
        yield timeout.seconds()
    except Late:
        timeout.late()
        raise
    timeout.succeeded(time.monotonic() - began)
