"""A heap from which anything may be taken: the lines, the tenants' turns and the timers are such."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", float, tuple[int, bool, int])
T = TypeVar("T", bound=Hashable)

_SLACK = 64


class Heap(Generic[K, T]):
    """Holds each item once: least key first, then as they came. Every change is O(log n), amortised.

    An entry that was taken out, or given another key, stays behind until it comes to the top or more than half do.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[K, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._last_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: object) -> bool:
        return item in self._tickets

    @property
    def first(self) -> T | None:
        """The item with the least key, or None when there is none."""
        entries, tickets = self._entries, self._tickets
        while entries:
            _, ticket, item = entries[0]
            if tickets.get(item) == ticket:
                return item
            heapq.heappop(entries)
        return None

    @property
    def first_key(self) -> K | None:
        """The least key, or None when there is none."""
        return None if self.first is None else self._entries[0][0]

    def put(self, item: T, key: K) -> None:
        """Add an item, or give it another key."""
        self._last_ticket += 1
        self._tickets[item] = self._last_ticket
        heapq.heappush(self._entries, (key, self._last_ticket, item))
        if len(self._entries) > 2 * len(self._tickets) + _SLACK:
            self._sweep()

    def discard(self, item: T) -> None:
        """Take an item out, if it is there."""
        if self._tickets.pop(item, None) is not None and len(self._entries) > 2 * len(self._tickets) + _SLACK:
            self._sweep()

    def _sweep(self) -> None:
        """Drop all that stayed behind."""
        self._entries = [entry for entry in self._entries if self._tickets.get(entry[2]) == entry[1]]
        heapq.heapify(self._entries)
