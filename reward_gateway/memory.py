"""Remembers scores by what was scored: the reward, its settings, and all that a reward sees of the episode."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rollfarm.reward import Score
from rollfarm.v1 import reward_gateway_pb2, trajectory_pb2

MOST_DETAIL = 2000
"""Characters of a remembered score's detail; a score that says more is not remembered."""


class Memory:
    """At most `size` scores. The one that was not asked for longest goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: bytes) -> Score | None:
        """The score, if it is remembered."""
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def put(self, key: bytes, score: Score) -> None:
        """Remember it."""
        if len(score.detail) > MOST_DETAIL:
            return
        self._scores[key] = score
        self._scores.move_to_end(key)
        while len(self._scores) > self._size:
            self._scores.popitem(last=False)


def key_of(reward: str, settings: Mapping[str, Any], episode: reward_gateway_pb2.ScoredEpisode) -> bytes:
    """The same for episodes between which a reward sees no difference. What else a task says is left out."""
    task = episode.task
    seen = reward_gateway_pb2.ScoredEpisode(
        task=trajectory_pb2.Task(
            domain=task.domain, environment=task.environment, seed=task.seed, settings_json=task.settings_json
        ),
        turns=episode.turns,
        reference=episode.reference,
        metrics=episode.metrics,
        outcome=episode.outcome,
    )
    digest = hashlib.sha256(json.dumps([reward, settings], sort_keys=True, default=str).encode())
    digest.update(seen.SerializeToString(deterministic=True))
    return digest.digest()
