"""The environment's verdict, by rank among the siblings."""

from collections.abc import Sequence

from reward_gateway.rewards.environment import environment
from rollfarm.reward import Episode, compares


@compares
def rank(episodes: Sequence[Episode]) -> list[float]:
    """The share of the siblings that the environment paid less, those that it paid the same counted half: 0 to 1."""
    paid = [environment(episode) for episode in episodes]
    return [(sum((a > b) + (a == b) / 2 for b in paid) - 0.5) / (len(paid) - 1) for a in paid]
