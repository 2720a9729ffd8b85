"""Find the number: after each guess the environment says "higher" or "lower"."""

import random
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from env_manager.environments.solvable import Instant
from rollfarm.env import Observation, Step

MOST_DIGITS = 100
"""Longer is no number: turning digits into one takes time that grows with the square of their count."""


class GuessNumber(Instant):
    """Multi-turn guessing, where the past has to be remembered."""

    name = "guess_number"

    def __init__(
        self,
        *,
        high: Annotated[int, Field(ge=2)] = 20,
        turns: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        """The number lies in 1 to `high`. 0 `turns` allows one more than halving needs."""
        self._high = high
        self._turns_left = turns or high.bit_length() + 1
        self._per_turn = 1 / self._turns_left
        self._number = 0
        self._low_left, self._high_left = 1, high

    def words(self) -> Iterator[str]:
        yield from ("guess", "from", "to", "higher", "lower", "number", "please")
        yield from map(str, range(1, self._high + 1))

    def reset(self, seed: int, index: int) -> Observation:
        self._number = random.Random(seed).randint(1, self._high)
        return Observation(f"guess from 1 to {self._high}", reference=str(self._number), state_hash=self._state())

    def step(self, action: str) -> Step:
        """Finding it pays 0.5, and 0.5 more for the share of turns that are left; not a number costs a tenth."""
        self._turns_left -= 1
        guess = number_in(action)
        if guess == self._number:
            reward = 0.5 + 0.5 * self._turns_left * self._per_turn
            return Step(reward=reward, done=True, state_hash=self._state(), metrics={"success": 1.0})
        over = self._turns_left == 0
        answer, reward = self._hint(guess)
        return Step(
            answer, reward=reward, done=over, truncated=over, state_hash=self._state(), metrics={"success": 0.0}
        )

    def _hint(self, guess: int | None) -> tuple[str, float]:
        if guess is None:
            return "number please", -0.1
        if guess < self._number:
            self._low_left = max(self._low_left, guess + 1)
            return "higher", 0.0
        self._high_left = min(self._high_left, guess - 1)
        return "lower", 0.0

    def solve(self) -> str:
        return str((self._low_left + self._high_left) // 2)

    def actions(self) -> list[str]:
        return [str(number) for number in range(1, self._high + 1)]

    def _state(self) -> str:
        return f"{self._low_left}-{self._high_left}"


def number_in(action: str) -> int | None:
    """The number that the action is; None where it is none."""
    word = action.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS else None
