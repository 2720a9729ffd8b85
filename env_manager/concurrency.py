"""How many episodes are played at once: as many as the engines keep up with.

What is played beyond that only queues at llm_proxy: its samples grow old, and nothing is finished earlier. So the limit
falls by as many generations as queue beyond a share of those that the engines make, and rises by as many as are missing
to that share. Engines that are full give back what they were given less, so one step from any excess is about the right
one; and a share of what they make waits at all times, so that none is ever idle for want of work.
"""

import math
from statistics import fmean, median

ROUNDS = 2
"""Generations of each episode that a look waits for, on average."""

STEEPEST_FALL = 0.5
"""Of the limit, at one look: a backlog that is being worked off looks like more than it is."""


class Concurrency:
    """The limit, between `least` and `slots`, and how many are running. `least` 0 always uses every slot."""

    def __init__(self, slots: int, least: int, share: float, now: float) -> None:
        self.limit = slots
        self.running = 0
        self._slots = slots
        self._least = least or slots
        self._share = share
        self._changed_at = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Measure anew: what was asked before says how it was then."""
        self._began = now
        self._played = 0.0
        self._queued: list[float] = []
        self._generated: list[float] = []

    @property
    def free(self) -> int:
        """Episodes that may begin now."""
        return max(0, self.limit - self.running)

    def begin(self, now: float) -> None:
        """An episode begins."""
        self._pass(now)
        self.running += 1

    def end(self, now: float) -> None:
        """An episode needs the engines no more."""
        self._pass(now)
        self.running -= 1

    def generated(self, queue_seconds: float, generate_seconds: float, now: float) -> bool:
        """A generation is finished. Whether that changed the limit."""
        if self._least == self._slots:
            return False
        if self.running > self.limit:
            self._begin(now)
        elif now - queue_seconds - generate_seconds > self._began:
            self._queued.append(queue_seconds)
            self._generated.append(generate_seconds)
        if len(self._queued) < ROUNDS * self.limit:
            return False
        self._pass(now)
        before, self.limit = self.limit, self._look(now - self._began)
        self._begin(now)
        return self.limit != before

    def _look(self, seconds: float) -> int:
        """The limit that fits what was measured.

        The usual generation counts, not the mean: what waited for engines that were taking weights says nothing.
        """
        queued, generating = median(self._queued), fmean(self._generated)
        asking = seconds - fmean(self._queued) - generating  # what was asked later than that was not seen
        per_second = len(self._queued) / asking
        missing = per_second * (self._share * generating - queued)
        fitting = math.ceil(self._played / seconds + missing)
        if missing < 0:
            return min(self.limit, max(self._least, fitting, math.ceil(STEEPEST_FALL * self.limit)))
        return min(self._slots, max(self.limit, fitting))

    def _pass(self, now: float) -> None:
        self._played += self.running * (now - self._changed_at)
        self._changed_at = now
