"""When an engine that fails is left alone, and how it comes back.

Invariant: a breaker that opened lets one request through at a time, and only after its suspension; so an engine that
is well again always comes back, and one that is not costs one attempt for each suspension.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    """How far an engine is trusted."""

    CLOSED = auto()
    """It gets requests."""

    OPEN = auto()
    """It gets none until its suspension is over."""

    READY = auto()
    """It gets the next request, as a probe."""

    PROBING = auto()
    """It has the probe."""


@dataclass(slots=True)
class Breaker:
    """One engine's breaker."""

    most_failures: int
    """Failures in a row at which it opens. 0 is never."""

    first_seconds: float
    """Suspension when it opens."""

    most_seconds: float
    """Longest suspension, after failed probes."""

    phase: Phase = Phase.CLOSED
    failures: int = 0
    """In a row: since a request last finished."""

    seconds: float = 0.0
    """The latest suspension."""

    reopens_at: float = 0.0
    """When the suspension is over, if it is OPEN."""

    cause: str = ""
    """Of the failure that opened it."""

    def failed(self, now: float, cause: str, *, is_probe: bool = False) -> bool:
        """A request failed at the engine, or all of them did at once. Whether that opened it."""
        if self.phase is Phase.CLOSED:
            self.failures += 1
            return 0 < self.most_failures <= self.failures and self.open(now, cause)
        return is_probe and self.open(now, cause)

    def open(self, now: float, cause: str) -> bool:
        """Suspend the engine, twice as long as before if it was its probe that failed."""
        if self.phase is Phase.CLOSED:
            self.seconds = self.first_seconds
        else:
            self.seconds = min(2 * self.seconds, self.most_seconds)
        self.phase, self.cause = Phase.OPEN, cause
        self.reopens_at = now + self.seconds
        return True

    def finished(self) -> None:
        """A request finished: failures before it do not count."""
        self.failures = 0

    def let_probe(self) -> None:
        """The suspension is over."""
        self.phase = Phase.READY

    def probe(self) -> None:
        """The next request is with the engine."""
        self.phase = Phase.PROBING

    def close(self) -> None:
        """The probe brought a token."""
        self.phase, self.failures = Phase.CLOSED, 0

    def probe_left(self) -> None:
        """The probe ended and says nothing: it was cancelled, or given back."""
        if self.phase is Phase.PROBING:
            self.phase = Phase.READY
