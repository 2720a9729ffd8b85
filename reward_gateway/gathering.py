"""Gathers the members of a group until they can be compared with each other.

Members come one by one, as their episodes end. The one that completes the group sets its first comparison off, which
judges all. A member that comes later, because it is redundant or was played again, is compared with the first ones;
only its own verdict counts then. Groups that rest too long, or are too much to keep, are forgotten.

Invariant: what is kept weighs at most `most_bytes`, or is one group alone.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollfarm.errors import RewardFailed

K = TypeVar("K", bound=Hashable)
E = TypeVar("E")


@dataclass(frozen=True)
class Comparison(Generic[E]):
    """Members to compare with each other."""

    episodes: Mapping[int, E]
    """By number, in ascending order."""

    judged: frozenset[int]
    """Those whose verdicts count."""


@dataclass
class _Group(Generic[E]):
    size: int
    rests_since: float
    episodes: dict[int, E] = field(default_factory=dict[int, E])
    bytes_of: dict[int, int] = field(default_factory=dict[int, int])
    is_complete: bool = False


class Gathering(Generic[K, E]):
    """`K` names a group, and `E` is an episode."""

    def __init__(self, *, keep_seconds: float, most_bytes: int) -> None:
        self._keep_seconds = keep_seconds
        self._most_bytes = most_bytes
        self._groups: OrderedDict[K, _Group[E]] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def here(self, key: K) -> int:
        """How many members of the group are here."""
        return len(self._groups[key].episodes) if key in self._groups else 0

    def add(self, key: K, member: int, size: int, episode: E, size_bytes: int, now: float) -> Comparison[E] | None:
        """The comparison that this member sets off; None while members are missing.

        A member that is sent again replaces itself. Raises RewardFailed when its siblings gave another size.
        """
        group = self._groups.setdefault(key, _Group(size, now))
        if group.size != size:
            raise RewardFailed(
                f"The group has {group.size} members by its first one, and {size} by member {member}.", member=member
            )
        group.rests_since = now
        self._groups.move_to_end(key)
        if group.is_complete and member not in group.episodes:
            return Comparison(_ordered({**group.episodes, member: episode}), frozenset([member]))
        self.held_bytes += size_bytes - group.bytes_of.get(member, 0)
        group.episodes[member], group.bytes_of[member] = episode, size_bytes
        if group.is_complete:
            return Comparison(_ordered(group.episodes), frozenset([member]))
        if len(group.episodes) < size:
            return None
        group.is_complete = True
        return Comparison(_ordered(group.episodes), frozenset(group.episodes))

    def forget(self, now: float) -> list[K]:
        """Drop the groups that have rested too long, and those that are too much. They are named."""
        forgotten: list[K] = []
        while self._groups:
            key, group = next(iter(self._groups.items()))
            is_too_much = self.held_bytes > self._most_bytes and len(self._groups) > 1
            if now - group.rests_since < self._keep_seconds and not is_too_much:
                break
            del self._groups[key]
            self.held_bytes -= sum(group.bytes_of.values())
            forgotten.append(key)
        return forgotten


def _ordered(episodes: Mapping[int, E]) -> dict[int, E]:
    return dict(sorted(episodes.items()))
