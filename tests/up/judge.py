"""A reward of one's own, with a server that wants a password."""

from rollfarm.reward import Episode


def judge(episode: Episode, *, url: str) -> float:
    return float(bool(url and episode.answer))
