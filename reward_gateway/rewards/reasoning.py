"""The scorers of reasoning-gym's datasets. Runs in workers alone: the package takes seconds to import."""

import json

from reward_gateway.rewards.words import final
from rollfarm import reasoning
from rollfarm.reward import Episode, pure


@pure
def reasoning_gym(episode: Episode) -> float:
    """How the dataset that the task is of scores the policy's final answer: 0 to 1; what it would run is 0.

    The reference is the task's entry as JSON, as the dataset made it: question, answer, and metadata with its
    source_dataset. Raises ValueError when it is not.
    """
    from reasoning_gym import get_score_answer_fn

    try:
        entry = json.loads(episode.reference)
        dataset, _, _ = entry["metadata"]["source_dataset"], entry["question"], entry["answer"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("the reference is no entry of a reasoning-gym dataset as JSON") from None
    return reasoning.score(get_score_answer_fn(dataset), final(episode.answer), entry)
