"""The format of the answer: its tags."""

from collections.abc import Sequence

from rollfarm.reward import Episode


def tags(episode: Episode, *, names: Sequence[str] = ("think", "answer"), only: bool = False) -> float:
    """1 when the policy's last words hold each of <name>...</name> once, in this order and not within each other.

    With `only` there is nothing beside them but space.
    """
    text = episode.answer
    at = 0
    for name in names:
        opened, closed = f"<{name}>", f"</{name}>"
        begin, end = text.find(opened), text.find(closed)
        if text.count(opened) != 1 or text.count(closed) != 1 or not at <= begin < end:
            return 0.0
        if only and text[at:begin].strip():
            return 0.0
        at = end + len(closed)
    return float(not (only and text[at:].strip()))
