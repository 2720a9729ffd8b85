"""A domain's places: how many of its episodes are scored at once, and in which order the others come.

Invariant: nobody waits while a place is free, and places are given in the order in which they were asked for.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from rollfarm.errors import RewardFailed

W = TypeVar("W", bound=Hashable)


class Places(Generic[W]):
    """`W` is whoever asks for a place; each asks once."""

    def __init__(self, *, places: int, most_waiting: int) -> None:
        self._places = places
        self._most_waiting = most_waiting
        self._waiting: dict[W, None] = {}
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, who: W) -> bool:
        """Whether `who` has a place now; else it waits, and `leave` names it in its turn.

        Raises RewardFailed when as many wait as may.
        """
        if self.running < self._places:
            self.running += 1
            return True
        if len(self._waiting) >= self._most_waiting:
            raise RewardFailed(
                f"{self.running} episodes of this domain are being scored and {len(self._waiting)} wait.",
                running=self.running,
                waiting=len(self._waiting),
            )
        self._waiting[who] = None
        return False

    def leave(self) -> W | None:
        """A place is given back. Whoever has waited longest has it now."""
        if not self._waiting:
            self.running -= 1
            return None
        who = next(iter(self._waiting))
        del self._waiting[who]
        return who

    def give_up(self, who: W) -> bool:
        """Whether `who` was still waiting, and waits no more; else it has a place, and has to leave it."""
        if who not in self._waiting:
            return False
        del self._waiting[who]
        return True
