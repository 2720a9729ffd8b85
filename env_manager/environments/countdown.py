"""Make the target from the numbers, each used at most once, with + - * / and parentheses.

The policy answers with an expression, of which the last line counts, and what follows "=" does not. A miss is answered
with "too low" or "too high", until the turns are used up. As tools, `calculate` says what any expression makes,
and `answer` takes one.

Reward: the first valid expression pays 0.1, and reaching the target pays what is missing to 1.
"""

import operator
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from env_manager.environments.expressions import BadExpression, compute
from env_manager.environments.solvable import Instant, digest, last_line
from env_manager.environments.toolbox import argument, calls_of, problem_of, tool
from rollfarm.env import Observation, Step, ToolCall, ToolResult

VALID = 0.1

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

MAX_TRIES = 1000
"""Sums made up before one is taken whatever it makes."""

RULES = (
    "Make the target from the numbers with + - * / and parentheses. Use each number at most once. "
    "Answer with the expression alone, for example: ( 3 + 4 ) * 2"
)

TOOLS = (
    tool("calculate", "Compute an expression; it does not count as an answer.", expression="For example 3 * (7 - 2)"),
    tool("answer", "Answer with an expression.", expression="For example 3 * (7 - 2)"),
)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the sum that is made up."""

    value: Fraction
    text: str


class Countdown(Instant):
    """Reaching a number, in a few tries."""

    name = "countdown"

    def __init__(
        self,
        *,
        count: Annotated[int, Field(ge=2, le=6)] = 4,
        high: Annotated[int, Field(ge=9, le=100)] = 25,
        target: Annotated[int, Field(ge=10, le=1000)] = 100,
        turns: Annotated[int, Field(ge=1)] = 3,
        tools: bool = False,
        rules: bool = True,
    ) -> None:
        """There are `count` numbers of 1 to `high`, and the target is at most `target`. `tools` offers a calculator,
        whose use costs a turn. `rules` explains it in a system message."""
        self._count, self._high, self._most = count, high, target
        self._turns_left = turns
        self._tools = TOOLS if tools else ()
        self._rules = RULES if rules else ""
        self._paid = 0.0

    def words(self) -> Iterator[str]:
        yield from (
            "numbers",
            "target",
            "too",
            "low",
            "high",
            "long",
            "not",
            "an",
            "expression",
            "divides",
            "by",
            "zero",
        )
        yield from ("uses", "what", "is", "given", "(", ")", *OPERATORS, *self._rules.split())
        yield from map(str, range(1, max(self._high, self._most) + 1))

    def reset(self, seed: int, index: int) -> Observation:
        chance = random.Random(seed)
        self._numbers, self._target, self._solution = self._make_up(chance)
        self._tried: list[Fraction] = []
        text = f"numbers {' '.join(map(str, self._numbers))} target {self._target}"
        return Observation(
            text, reference=self._solution, system=self._rules, state_hash=self._state(), tools=self._tools
        )

    def step(self, action: str) -> Step:
        self._turns_left -= 1
        calls = calls_of(action) if self._tools else ()
        if self._tools and (problem := problem_of(action)):
            return self._answer(problem, reached=False)
        if not calls:
            text, reached = self._try(last_line(action))
            return self._answer(text, reached)
        results: list[ToolResult] = []
        answered = reached = False
        for call in calls:
            if call.name == "answer" and answered:
                text = "one answer a turn"
            elif call.name == "answer":
                text, reached = self._try(argument(call, "expression"))
                answered = True
            else:
                text = _calculated(call)
            results.append(ToolResult(call.tool_call_id, call.name, text))
        return self._answer("", reached, results)

    def solve(self) -> str:
        return self._solution

    def actions(self) -> list[str]:
        """Random sums of the numbers, the same each time."""
        chance = random.Random(self._solution)
        return [_combined(chance, self._numbers)[-1].text for _ in range(20)]

    def _try(self, expression: str) -> tuple[str, bool]:
        """What is said of an answer, and whether it reaches the target."""
        try:
            made = compute(expression.partition("=")[0])
        except BadExpression as problem:
            return str(problem), False
        if Counter(made.numbers) - Counter(self._numbers):
            return "uses what is not given", False
        self._tried.append(made.value)
        if made.value == self._target:
            return "right", True
        return "too low" if made.value < self._target else "too high", False

    def _answer(self, text: str, reached: bool, results: list[ToolResult] | None = None) -> Step:
        owed = 1.0 if reached else VALID if self._tried else 0.0
        reward, self._paid = owed - self._paid, owed
        over = reached or self._turns_left == 0
        return Step(
            "" if reached else text,
            reward=reward,
            done=over,
            truncated=over and not reached,
            state_hash=self._state(),
            metrics={"success": float(reached)},
            tool_results=results or (),
        )

    def _state(self) -> str:
        return digest(self._numbers, self._target, sorted(self._tried))

    def _make_up(self, chance: random.Random) -> tuple[list[int], int, str]:
        """Numbers, a target that some of them make, and how."""
        for _ in range(MAX_TRIES):
            numbers = [chance.randint(1, self._high) for _ in range(self._count)]
            term = chance.choice(_combined(chance, numbers)[1:])
            if 10 <= term.value <= self._most and term.value.denominator == 1 and term.value not in numbers:
                return numbers, int(term.value), term.text
        return [5, 5] + [1] * (self._count - 2), 10, "5 + 5"


def _calculated(call: ToolCall) -> str:
    if call.name != "calculate":
        return "no such tool"
    try:
        return str(compute(argument(call, "expression")).value)
    except BadExpression as problem:
        return str(problem)


def _combined(chance: random.Random, numbers: list[int]) -> list[Term]:
    """Random combinations of the numbers, each of one number more than the one before, as text with every space."""
    left = [Term(Fraction(number), str(number)) for number in numbers]
    chance.shuffle(left)
    terms = [left.pop()]
    while left:
        term, other = terms[-1], left.pop()
        first, second = (term, other) if chance.random() < 0.5 else (other, term)
        sign = chance.choice(list(OPERATORS) if second.value else ["+", "-", "*"])
        terms.append(Term(OPERATORS[sign](first.value, second.value), f"{_grouped(first)} {sign} {_grouped(second)}"))
    return terms


def _grouped(term: Term) -> str:
    return f"( {term.text} )" if " " in term.text else term.text
