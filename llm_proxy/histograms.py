"""How often a number was how large, counted for one thread: prometheus_client's own costs several times as much."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of the values up to each bound, and of all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` grow."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of the values."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """How many values are no greater than each bound, and than infinity, as Prometheus has it."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))
