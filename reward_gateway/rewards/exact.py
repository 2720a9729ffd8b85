"""The answer, letter by letter."""

from reward_gateway.rewards.words import spoken
from rollfarm.reward import Episode


def exact(episode: Episode, *, case_sensitive: bool = False) -> float:
    """1 when the policy's last words are the reference, else 0. Space and a final full stop do not matter.

    Raises ValueError when the environment gave no reference.
    """
    if not episode.reference.strip():
        raise ValueError(f"environment {episode.environment!r} gives no reference to compare with")
    return float(_plain(spoken(episode.answer), case_sensitive) == _plain(episode.reference, case_sensitive))


def _plain(text: str, case_sensitive: bool) -> str:
    words = " ".join(text.split()).removesuffix(".").rstrip()
    return words if case_sensitive else words.casefold()
