"""When an environment that fails is left alone, and how it comes back.

Invariant: while a breaker is open, its environment is played by one episode at a time, its probe, and by none before
the suspension is over. So an environment that is well again always comes back, and one that is not costs one episode
for each suspension.
"""

from collections import deque
from dataclasses import dataclass, field

WINDOW = 32
"""Episodes that are looked back upon, at least. As many as are being played count if those are more."""


@dataclass(slots=True)
class Breaker:
    """One environment's breaker. Only what the environment does counts: no generation, no reward, no cancellation.

    Who fails at once has ended before those that play on. So failures are held against as many episodes as are being
    played, or a burst of new ones would look as if all failed.
    """

    most_failures: int
    """Failures among the latest episodes at which it opens. 0 is never."""

    share: float
    """Of the latest episodes, those that have failed when it opens."""

    first_seconds: float
    """Suspension when it opens."""

    most_seconds: float
    """Longest suspension, after failed probes."""

    is_open: bool = False
    seconds: float = 0.0
    """The latest suspension."""

    reopens_at: float = 0.0
    """When the suspension is over, and a probe may be played."""

    recent: deque[bool] = field(default_factory=deque[bool])
    """Whether each of the latest episodes failed."""

    def played(self, playing: int = 0) -> None:
        """An episode came to its end, when so many were being played."""
        if not self.is_open:
            self._look_back_on(False, playing)

    def failed(self, now: float, playing: int = 0) -> bool:
        """The environment failed an episode, when so many were being played. Whether that opened the breaker."""
        if self.is_open:
            return False
        self._look_back_on(True, playing)
        failures = sum(self.recent)
        of = max(len(self.recent), playing)
        if not 0 < self.most_failures <= failures or failures < self.share * of:
            return False
        self.is_open = True
        self._suspend(now, self.first_seconds)
        return True

    def probe_failed(self, now: float) -> None:
        """The environment failed its probe: the next one is later."""
        self._suspend(now, min(2 * self.seconds, self.most_seconds))

    def probe_played(self) -> None:
        """The probe came to its end: what was before is forgotten."""
        self.is_open = False
        self.recent.clear()

    def _look_back_on(self, failed: bool, playing: int) -> None:
        self.recent.append(failed)
        while len(self.recent) > max(WINDOW, playing):
            self.recent.popleft()

    def _suspend(self, now: float, seconds: float) -> None:
        self.seconds = seconds
        self.reopens_at = now + seconds
