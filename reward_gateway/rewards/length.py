"""Rewards for saying less."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from rollfarm.reward import Episode, compares

Unit = Literal["characters", "words"]


def overlong(
    episode: Episode,
    *,
    most: Annotated[int, Field(ge=1)],
    buffer: Annotated[int, Field(ge=1)],
    unit: Unit = "characters",
) -> float:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) for all that the policy said, from 0 to -1.

    0                              up to  most - buffer
    ((most - buffer) - n) / buffer up to  most
    -1                             beyond, and for an episode that a limit cut short
    """
    said = size(episode, unit)
    if episode.truncated or said > most:
        return -1.0
    return min(0.0, (most - buffer - said) / buffer)


@compares
def relative_length(episodes: Sequence[Episode], *, unit: Unit = "characters") -> list[float]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599): from 0.5 for the shortest sibling to -0.5 for the longest.

        0.5 - (n - shortest) / (longest - shortest)

    It is 0 for all where all are equally long. A wrong answer may be paid for its brevity: in the paper it gets 0 at
    most, which is not known here. `clip = [-0.5, 0]` keeps to that for all.
    """
    said = [size(episode, unit) for episode in episodes]
    shortest, longest = min(said), max(said)
    if shortest == longest:
        return [0.0] * len(said)
    return [0.5 - (n - shortest) / (longest - shortest) for n in said]


def size(episode: Episode, unit: Unit) -> int:
    """Of all that the policy said."""
    texts = [turn.text for turn in episode.turns if turn.author == "policy"]
    return sum(len(text) if unit == "characters" else len(text.split()) for text in texts)
