"""Reads and computes sums such as "3 * (7 - 2)", exactly and without Python's own parser. Pure.

Grammar: sum = product {("+" | "-") product}; product = factor {("*" | "/") factor}; factor = number | "(" sum ")".
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction

MOST_CHARACTERS = 100
"""Of an expression; it bounds the work, the depth and the size of numbers."""

_TOKEN = re.compile(r"\s*([0-9]{1,9}|[-+*/()])")

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class BadExpression(ValueError):
    """What is wrong with it, in words that a policy can use."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A computed expression."""

    value: Fraction
    """What it makes."""

    numbers: tuple[int, ...]
    """The numbers in it, in order."""


def compute(text: str) -> Sum:
    """Read and compute `text`. Raises BadExpression."""
    if len(text) > MOST_CHARACTERS:
        raise BadExpression("too long")
    reader = _Reader(_tokens(text))
    value = reader.sum()
    if reader.next is not None:
        raise BadExpression("not an expression")
    return Sum(value, tuple(reader.numbers))


def _tokens(text: str) -> list[str]:
    text = text.translate(_SPELLINGS).strip()
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadExpression("not an expression")
        tokens.append(match[1])
        at = match.end()
    return tokens


@dataclass
class _Reader:
    tokens: list[str]
    at: int = 0
    numbers: list[int] = field(default_factory=list[int])

    @property
    def next(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        token = self.next
        if token is None:
            raise BadExpression("not an expression")
        self.at += 1
        return token

    def sum(self) -> Fraction:
        value = self.product()
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product()
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while self.next in ("*", "/"):
            if self.take() == "*":
                value *= self.factor()
            elif divisor := self.factor():
                value /= divisor
            else:
                raise BadExpression("divides by zero")
        return value

    def factor(self) -> Fraction:
        token = self.take()
        if token == "(":
            value = self.sum()
            if self.take() != ")":
                raise BadExpression("not an expression")
            return value
        if not token.isdecimal():
            raise BadExpression("not an expression")
        self.numbers.append(int(token))
        return Fraction(token)
