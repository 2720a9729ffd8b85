"""Puts the trackers of a run together, and lets go of them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollfarm.config import masked
from trainer.config import TrainerRoot
from trainer.trackers.config import build
from trainer.trackers.feed import CLOSE_SECONDS, Feed


def feeds_of(root: TrainerRoot) -> list[Feed]:
    """A feed for each tracker, not started."""
    config = _shown(root.model_dump(mode="json", exclude_unset=False))
    return [
        Feed(tracker.name.replace(":", "."), build(tracker), run=root.run.name, folder=root.run.path, config=config)
        for tracker in root.trainer.trackers
    ]


def close_all(feeds: Sequence[Feed]) -> None:
    """Let each send what is left, all together within CLOSE_SECONDS."""
    end = time.monotonic() + CLOSE_SECONDS
    for feed in feeds:
        feed.end()
    for feed in feeds:
        feed.close(max(0.0, end - time.monotonic()))


def _shown(value: Any) -> Any:
    """Plain JSON, passwords masked."""
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return masked(value) if isinstance(value, str) else value
