"""Find the secret word: every guess is answered, letter by letter, with "right", "elsewhere" or "absent".

As in Wordle, a letter is "elsewhere" as often as the secret has more of it than are right. The policy answers with a
word, of which the last line counts; any word of that length is a guess, and anything else costs a turn.

Reward, together at most 1: each position whose letter is right for the first time pays its share of 0.3, finding the
word pays 0.4, and 0.3 for the share of turns that are left.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from env_manager.environments.solvable import Instant, digest, last_line
from env_manager.environments.word_list import WORDS
from rollfarm.env import Observation, Step

LETTERS, FOUND, SPEED = 0.3, 0.4, 0.3

RIGHT, ELSEWHERE, ABSENT = "right", "elsewhere", "absent"

Answer = tuple[str, ...]
"""What is said of a guess, a mark for each letter."""

LOOKED_AT = 50
"""Words that the solver compares, at most."""

RULES = (
    "Find the secret word. Answer with one word. Each of its letters is then called right, elsewhere (the word has it "
    "at another place) or absent."
)


class WordGame(Instant):
    """Multi-turn guessing of a word, where every answer narrows what is left."""

    name = "word_game"

    def __init__(
        self,
        *,
        length: Literal[4, 5, 6] = 5,
        turns: Annotated[int, Field(ge=1)] = 6,
        rules: bool = True,
    ) -> None:
        """The secret is a common word of `length` letters. `rules` explains it in a system message."""
        self._words = WORDS[length]
        self._length = length
        self._turns = self._turns_left = turns
        self._rules = RULES if rules else ""
        self._found: set[int] = set()
        self._answers: dict[str, Answer] = {}

    def words(self) -> Iterator[str]:
        yield from ("a", "word", "of", str(self._length), "letters", "please", RIGHT, ELSEWHERE, ABSENT)
        yield from self._rules.split()
        yield from self._words

    def reset(self, seed: int, index: int) -> Observation:
        self._secret = random.Random(seed).choice(self._words)
        text = f"a word of {self._length} letters"
        return Observation(text, reference=self._secret, system=self._rules, state_hash=self._state())

    def step(self, action: str) -> Step:
        self._turns_left -= 1
        guess = last_line(action)
        if len(guess) == self._length and guess.isascii() and guess.isalpha():
            text, reward = self._judge(guess)
        else:
            text, reward = f"a word of {self._length} letters please", 0.0
        found = guess == self._secret
        if found:
            reward += FOUND + SPEED * self._turns_left / self._turns
        over = found or self._turns_left == 0
        return Step(
            "" if found else text,
            reward=reward,
            done=over,
            truncated=over and not found,
            state_hash=self._state(),
            metrics={"success": float(found), "progress": len(self._found) / self._length},
        )

    def solve(self) -> str:
        """The word that may still be the secret and tells the others best apart."""
        return _most_telling(
            tuple(
                word
                for word in self._words
                if all(feedback(guess, word) == answer for guess, answer in self._answers.items())
            )
        )

    def actions(self) -> Sequence[str]:
        return self._words

    def _judge(self, guess: str) -> tuple[str, float]:
        answer = self._answers[guess] = feedback(guess, self._secret)
        new = {place for place, mark in enumerate(answer) if mark == RIGHT} - self._found
        self._found |= new
        return " ".join(answer), LETTERS * len(new) / self._length

    def _state(self) -> str:
        return digest(self._secret, sorted(self._answers))


def feedback(guess: str, secret: str) -> Answer:
    """What is said of each letter of `guess`."""
    spare = Counter(theirs for ours, theirs in zip(guess, secret, strict=True) if ours != theirs)
    marks: list[str] = []
    for ours, theirs in zip(guess, secret, strict=True):
        if ours == theirs:
            marks.append(RIGHT)
        elif spare[ours] > 0:
            spare[ours] -= 1
            marks.append(ELSEWHERE)
        else:
            marks.append(ABSENT)
    return tuple(marks)


@lru_cache(maxsize=1024)
def _most_telling(words: Sequence[str]) -> str:
    """Of some of the words, the one whose answers leave the fewest of all, on average; the first of equals."""
    some = words[:: len(words) // LOOKED_AT + 1]
    return min(some, key=lambda guess: sum(n * n for n in Counter(feedback(guess, word) for word in words).values()))
