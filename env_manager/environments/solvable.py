"""What the built-in environments have beyond the SDK's: an expert, for demonstrations and tests, and a vocabulary."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from rollfarm.env import Environment, Observation, Step


class Solvable(Environment):
    """An environment that knows how it is played well. Its methods are instant."""

    fast = True

    ACTIONS: ClassVar[tuple[str, ...]]
    """Some actions that it takes, for noise in demonstrations."""

    @abstractmethod
    def words(self) -> Iterator[str]:
        """Every word that it shows or takes, with its settings. Some come twice, and there may be very many."""

    @abstractmethod
    def reset(self, seed: int, index: int) -> Observation: ...

    @abstractmethod
    def step(self, action: str) -> Step: ...

    @abstractmethod
    def solve(self) -> str:
        """The best action in the present state."""
