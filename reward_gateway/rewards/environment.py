"""The environment's own verdict."""

from rollfarm.reward import Episode


def environment(episode: Episode) -> float:
    """The sum of what the environment paid for each action."""
    return sum(turn.step_reward for turn in episode.turns if turn.step_reward is not None)
