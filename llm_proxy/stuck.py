"""Attempts that bring no token: they are moved when another engine has nothing better to do.

Invariant: an attempt is here for as long as it runs; it counts as stuck from the time that it is overdue, or its engine
stalls, until it brings a token.
"""

from llm_proxy.heaps import Heap
from llm_proxy.pool import Attempt


class StuckAttempts:
    """Which attempts are stuck."""

    def __init__(self, seconds: float) -> None:
        """An attempt without a token for this long is stuck. 0 is never."""
        self._seconds = seconds
        self._due: Heap[float, Attempt] = Heap()
        self._stuck: dict[Attempt, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stuck)

    @property
    def attempts(self) -> list[Attempt]:
        """Those stuck, the longest first."""
        return list(self._stuck)

    @property
    def next_check(self) -> float | None:
        """When the next one may be overdue."""
        return self._due.first_key

    def watch(self, attempt: Attempt) -> None:
        """It began, or goes on after it was stuck."""
        self._stuck.pop(attempt, None)
        if self._seconds:
            self._due.put(attempt, attempt.progress_at + self._seconds)

    def progressed(self, attempt: Attempt) -> None:
        """It brought a token."""
        if attempt in self._stuck:
            self.watch(attempt)

    def add(self, attempt: Attempt) -> None:
        """Its engine stalls."""
        self._due.discard(attempt)
        self._stuck[attempt] = None

    def forget(self, attempt: Attempt) -> None:
        """It is over."""
        self._due.discard(attempt)
        self._stuck.pop(attempt, None)

    def check(self, now: float) -> None:
        """Look whose time is up. One that brought a token meanwhile has time again."""
        while (due := self._due.first_key) is not None and due <= now:
            attempt = self._due.first
            assert attempt is not None
            if attempt.progress_at + self._seconds <= now:
                self.add(attempt)
            else:
                self.watch(attempt)
