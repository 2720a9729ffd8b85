"""Small programs to write: each a reference solution, what it is called with, and what its parameters may be.

A solution's docstring is the task as the policy reads it. Its keyword-only parameters are chosen anew for each episode
and are numbers in the text; the policy's function takes the others alone.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby


def count_multiples(values: list[int], *, divisor: int) -> int:
    """Count the values that {divisor} divides."""
    return sum(value % divisor == 0 for value in values)


def sum_above(values: list[int], *, bound: int) -> int:
    """Add up the values greater than {bound}."""
    return sum(value for value in values if value > bound)


def keep_between(values: list[int], *, low: int, high: int) -> list[int]:
    """Keep the values from {low} to {high}, both included, in order."""
    return [value for value in values if low <= value <= high]


def rotate(values: list[int], *, steps: int) -> list[int]:
    """Move every value {steps} places to the left; those that fall off come back on the right."""
    cut = steps % len(values) if values else 0
    return values[cut:] + values[:cut]


def every_nth(values: list[int], *, n: int) -> list[int]:
    """Keep each {n}th value: with 3 it is the third, the sixth, and so on."""
    return values[n - 1 :: n]


def chunks(values: list[int], *, size: int) -> list[list[int]]:
    """Cut the values into lists of {size}; the last may be shorter."""
    return [values[at : at + size] for at in range(0, len(values), size)]


def largest(values: list[int], *, count: int) -> list[int]:
    """The {count} largest values, the largest first; all of them where there are fewer."""
    return sorted(values, reverse=True)[:count]


def running_totals(values: list[int], *, start: int) -> list[int]:
    """The sum so far after each value, where it begins at {start}."""
    totals: list[int] = []
    for value in values:
        totals.append((totals[-1] if totals else start) + value)
    return totals


def without_repeats(values: list[int], *, most: int) -> list[int]:
    """Keep each number at most {most} times: its first ones, in order."""
    return [value for at, value in enumerate(values) if values[:at].count(value) < most]


def count_pairs(values: list[int], *, total: int) -> int:
    """Count the pairs of values, at different places, that add up to {total}."""
    return sum(left + right == total for left, right in combinations(values, 2))


def longest_run(values: list[int], *, step: int) -> int:
    """The length of the longest stretch in which each value is the one before plus {step} or less; 0 for no values."""
    best = length = 0
    for at, value in enumerate(values):
        length = length + 1 if at and value <= values[at - 1] + step else 1
        best = max(best, length)
    return best


def insert_sorted(values: list[int], *, value: int) -> list[int]:
    """The values and {value} together, in rising order."""
    return sorted([*values, value])


def clamp_all(values: list[int], *, low: int, high: int) -> list[int]:
    """Replace what is below {low} with {low}, and what is above {high} with {high}."""
    return [min(max(value, low), high) for value in values]


def peaks(values: list[int], *, margin: int) -> list[int]:
    """The values that exceed both neighbours by at least {margin}; the first and the last are none."""
    inner = range(1, len(values) - 1)
    return [values[at] for at in inner if values[at] - max(values[at - 1], values[at + 1]) >= margin]


def caesar(text: str, *, shift: int) -> str:
    """Move each letter a to z by {shift} places in the alphabet, from z on to a. Leave the rest."""
    return "".join(chr((ord(c) - 97 + shift) % 26 + 97) if "a" <= c <= "z" else c for c in text)


def count_vowels(text: str, *, least: int) -> int:
    """Count the words with at least {least} of the vowels a, e, i, o, u."""
    return sum(sum(letter in "aeiou" for letter in word) >= least for word in text.split())


def long_words(text: str, *, length: int) -> list[str]:
    """The words of at least {length} letters, in order."""
    return [word for word in text.split() if len(word) >= length]


def reverse_long_words(text: str, *, length: int) -> str:
    """Reverse each word of at least {length} letters; words are parted by one space."""
    return " ".join(word[::-1] if len(word) >= length else word for word in text.split())


def shorten(text: str, *, length: int) -> str:
    """Cut the text after {length} characters, and add "..." where something was cut."""
    return text if len(text) <= length else text[:length] + "..."


def common_letters(text: str, *, count: int) -> list[str]:
    """The {count} letters that occur most, spaces left out; of equals, the first in the alphabet first."""
    counted = Counter(text.replace(" ", ""))
    return sorted(counted, key=lambda letter: (-counted[letter], letter))[:count]


def squeeze(text: str, *, least: int) -> str:
    """Replace each run of at least {least} equal characters with the character and the run's length, as in a4."""
    runs = [(key, len(list(run))) for key, run in groupby(text)]
    return "".join(f"{key}{length}" if length >= least else key * length for key, length in runs)


def is_palindrome(text: str, *, skip: int) -> bool:
    """Whether the text without its first {skip} characters reads the same backwards."""
    rest = text[skip:]
    return rest == rest[::-1]


def in_base(number: int, *, base: int) -> str:
    """Write the number in base {base}, with the digits 0 to 9."""
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return digits or "0"


def digit_powers(number: int, *, power: int) -> int:
    """Add up the digits of the number, each to the power of {power}."""
    return sum(int(digit) ** power for digit in str(number))


def collatz_steps(number: int, *, most: int) -> int:
    """Halve an even number and take 3n + 1 of an odd one, until it is below 2. How many steps? At most {most}."""
    steps = 0
    while number >= 2 and steps < most:
        number = 3 * number + 1 if number % 2 else number // 2
        steps += 1
    return steps


def primes_below(number: int, *, ending: int) -> list[int]:
    """The primes below the number whose last digit is not {ending}."""
    primes = [n for n in range(2, number) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1))]
    return [prime for prime in primes if prime % 10 != ending]


def common_divisors(number: int, *, other: int) -> list[int]:
    """The numbers that divide both the number and {other}, in rising order."""
    return [divisor for divisor in range(1, other + 1) if number % divisor == 0 and other % divisor == 0]


def fewest_coins(number: int, *, coin: int) -> int:
    """The fewest coins of 1, {coin} and 10 that make the number."""
    tens = range(number // 10 + 1)
    coins = ((ten, middle, number - 10 * ten - coin * middle) for ten in tens for middle in range(number // coin + 1))
    return min(sum(counts) for counts in coins if counts[-1] >= 0)


def flip_rows(rows: list[list[int]], *, every: int) -> list[list[int]]:
    """Reverse each {every}th row of the table, and leave the others."""
    return [row[::-1] if at % every == 0 else row for at, row in enumerate(rows, start=1)]


def column_sums(rows: list[list[int]], *, factor: int) -> list[int]:
    """The sum of each column of the table, times {factor}."""
    return [factor * sum(column) for column in zip(*rows, strict=True)]


def merge_intervals(pairs: list[list[int]], *, gap: int) -> list[list[int]]:
    """Sort the intervals [first, last], and join those of which one begins at most {gap} after another's end."""
    merged: list[list[int]] = []
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1] + gap:
            merged[-1] = [merged[-1][0], max(merged[-1][1], last)]
        else:
            merged.append([first, last])
    return merged


def integers(chance: random.Random) -> list[int]:
    return [chance.randint(-12, 12) for _ in range(chance.randint(0, 10))]


def sentence(chance: random.Random) -> str:
    lengths = (chance.randint(1, 8) for _ in range(chance.randint(0, 6)))
    return " ".join("".join(chance.choice("aabceeilorstu") for _ in range(length)) for length in lengths)


def runs(chance: random.Random) -> str:
    return "".join(chance.choice("abc") * chance.randint(1, 6) for _ in range(chance.randint(0, 6)))


def mirrored(chance: random.Random) -> str:
    half = "".join(chance.choice("ab") for _ in range(chance.randint(0, 4)))
    return "".join(chance.choice("ab") for _ in range(chance.randint(0, 4))) + half + half[::-1]


def natural(chance: random.Random) -> int:
    return chance.choice((chance.randint(0, 9), chance.randint(10, 99), chance.randint(100, 400)))


def table(chance: random.Random) -> list[list[int]]:
    width = chance.randint(1, 4)
    return [[chance.randint(-9, 9) for _ in range(width)] for _ in range(chance.randint(1, 5))]


def intervals(chance: random.Random) -> list[list[int]]:
    firsts = (chance.randint(0, 30) for _ in range(chance.randint(0, 6)))
    return [[first, first + chance.randint(0, 6)] for first in firsts]


@dataclass(frozen=True, slots=True)
class Task:
    """A family of tasks."""

    solution: Callable[..., object]
    argument: Callable[[random.Random], object]
    """Makes what the function is called with."""

    parameters: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Values of each keyword-only parameter."""


TASKS: tuple[Task, ...] = (
    Task(count_multiples, integers, {"divisor": range(2, 6)}),
    Task(sum_above, integers, {"bound": range(-5, 6)}),
    Task(keep_between, integers, {"low": range(-8, 0), "high": range(1, 9)}),
    Task(rotate, integers, {"steps": range(1, 6)}),
    Task(every_nth, integers, {"n": range(2, 5)}),
    Task(chunks, integers, {"size": range(2, 5)}),
    Task(largest, integers, {"count": range(1, 6)}),
    Task(running_totals, integers, {"start": range(-9, 10)}),
    Task(without_repeats, integers, {"most": range(1, 3)}),
    Task(count_pairs, integers, {"total": range(-5, 6)}),
    Task(longest_run, integers, {"step": range(5)}),
    Task(insert_sorted, integers, {"value": range(-9, 10)}),
    Task(clamp_all, integers, {"low": range(-8, 0), "high": range(1, 9)}),
    Task(peaks, integers, {"margin": range(1, 5)}),
    Task(caesar, sentence, {"shift": range(1, 26)}),
    Task(count_vowels, sentence, {"least": range(1, 4)}),
    Task(long_words, sentence, {"length": range(3, 7)}),
    Task(reverse_long_words, sentence, {"length": range(3, 7)}),
    Task(shorten, sentence, {"length": range(5, 20)}),
    Task(common_letters, sentence, {"count": range(1, 4)}),
    Task(squeeze, runs, {"least": range(2, 5)}),
    Task(is_palindrome, mirrored, {"skip": range(4)}),
    Task(in_base, natural, {"base": range(2, 10)}),
    Task(digit_powers, natural, {"power": range(2, 5)}),
    Task(collatz_steps, natural, {"most": range(5, 50)}),
    Task(primes_below, natural, {"ending": (1, 3, 7, 9)}),
    Task(common_divisors, natural, {"other": range(12, 61, 6)}),
    Task(fewest_coins, natural, {"coin": range(2, 10)}),
    Task(flip_rows, table, {"every": range(2, 4)}),
    Task(column_sums, table, {"factor": range(2, 10)}),
    Task(merge_intervals, intervals, {"gap": range(4)}),
)
