"""One question, one answer: "what is 3 plus 4". With a reference, so that the rewards exact and maths can judge too."""

import operator
import random
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from env_manager.environments.solvable import Instant
from rollfarm.env import Observation, Step

Operation = Literal["plus", "minus", "times"]

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}


class Arithmetic(Instant):
    """One-turn mental arithmetic."""

    name = "arithmetic"
    max_turns = 1

    def __init__(
        self,
        *,
        digits: Annotated[int, Field(ge=1, le=9)] = 1,
        operations: Annotated[list[Operation], Field(min_length=1)] = ["plus", "minus", "times"],  # noqa: B006
    ) -> None:
        """`digits` is the most that a number in the question has."""
        self._digits = digits
        self._operations = operations
        self._answer = 0

    def words(self) -> Iterator[str]:
        numbers = range(10**self._digits)
        yield from ("what", "is", *self._operations)
        yield from map(str, numbers)
        if "plus" in self._operations:
            yield from map(str, range(2 * numbers[-1] + 1))
        if "times" in self._operations:
            yield from (str(left * right) for left in numbers for right in numbers)

    def reset(self, seed: int, index: int) -> Observation:
        chance = random.Random(seed)
        operation = chance.choice(self._operations)
        left, right = (chance.randrange(10**self._digits) for _ in range(2))
        if operation == "minus" and left < right:
            left, right = right, left
        self._answer = OPERATIONS[operation](left, right)
        question = f"what is {left} {operation} {right}"
        return Observation(question, reference=str(self._answer), state_hash=question)

    def step(self, action: str) -> Step:
        success = float(action.strip() == str(self._answer))
        return Step(reward=success, done=True, state_hash="done", metrics={"success": success})

    def solve(self) -> str:
        return str(self._answer)

    def actions(self) -> list[str]:
        return [str(number) for number in range(82)]
