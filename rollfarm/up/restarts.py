"""When a crashed process is started again: at once at first, then ever later, and not for ever. No clock of its own."""

from dataclasses import dataclass, field

from rollfarm.up.config import UpConfig


@dataclass
class RestartPolicy:
    """Counts the crashes of one process, or of one gang of them."""

    max_restarts: int
    """Crashes within the window that are forgiven."""

    window_seconds: float
    first_delay: float = 0.25
    last_delay: float = 10.0
    _crashes: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, up: UpConfig) -> "RestartPolicy":
        return cls(up.max_restarts, up.restart_window_seconds)

    def crashed(self, now: float) -> float | None:
        """Seconds to wait before the next start, doubling with every crash in the window; None to give up."""
        self._crashes = [at for at in self._crashes if at > now - self.window_seconds] + [now]
        if len(self._crashes) > self.max_restarts:
            return None
        return min(self.last_delay, self.first_delay * 2 ** (len(self._crashes) - 1))
