"""What the built-in environments have beyond the SDK's: an expert, for demonstrations and tests, and a vocabulary."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from rollfarm.env import Environment, Observation, Step


class Solvable(Environment):
    """An environment that knows how it is played well."""

    @abstractmethod
    def solve(self) -> str:
        """The best action in the present state."""

    @abstractmethod
    def actions(self) -> Sequence[str]:
        """Some actions that it takes in the present state, for noise in demonstrations and for playing at random."""


class Instant(Solvable):
    """One whose methods return at once, and whose every word can be listed, for models that know whole words only."""

    runs = "loop"

    @abstractmethod
    def words(self) -> Iterator[str]:
        """Every word that it shows or takes, with its settings. Some come twice, and there may be very many."""

    @abstractmethod
    def reset(self, seed: int, index: int) -> Observation: ...

    @abstractmethod
    def step(self, action: str) -> Step: ...


def digest(*parts: object) -> str:
    """A short name for a state; equal exactly where all that `parts` print is."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def last_line(action: str) -> str:
    """What a policy that thinks aloud says at last, in lower case."""
    lines = action.strip().lower().splitlines()
    return lines[-1].strip() if lines else ""
