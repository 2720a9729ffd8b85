"""A fast farm and a slow trainer in virtual time: lag and outstanding work reach their bounds and never pass them."""

import math
from dataclasses import dataclass

import pytest

from sample_buffer.groups import Groups
from sample_buffer.state import Lease
from tests.sample_buffer.support import complete, lease, make_groups, make_spec, publish

BATCH = 4
STEPS = 12
EPISODE_SECONDS = 1.0
TRAIN_SECONDS = 10.0


@dataclass
class Story:
    """What was seen while the run lasted."""

    max_staleness: int
    most_outstanding: int
    most_taken: int
    """Groups taken and not yet in a published version, at most."""
    dropped: dict[str, int]


def run(alpha: float, *, slots: int, redundant_groups: int = 0) -> Story:
    """Play and train for STEPS steps: `slots` episodes at a time, one batch at a time."""
    groups = make_groups(
        make_spec(alpha=alpha, batch_groups=BATCH, group_size=2, redundant_groups=redundant_groups, lease_seconds=1e9)
    )
    playing: list[tuple[float, Lease]] = []
    most_outstanding = most_taken = step = 0
    now = trained_at = 0.0
    training = False
    while step < STEPS:
        if len(playing) < slots:
            playing += [(now + EPISODE_SECONDS, held) for held in lease(groups, slots - len(playing), now=now)]
        most_outstanding = max(most_outstanding, groups.credits_in_use)
        if not training and groups.take(step, now):
            training, trained_at = True, now + TRAIN_SECONDS
        most_taken = max(most_taken, sum(groups.state.charged.values()))
        now = min([end for end, _ in playing] + [trained_at] * training)
        finished = [held for end, held in playing if end <= now]
        playing = [(end, held) for end, held in playing if end > now]
        for held in finished:
            complete(groups, held, now=now)
        if training and trained_at <= now:
            training, step = False, step + 1
            publish(groups, trained=step, now=now)
            playing = still_wanted(groups, playing, now)
    return Story(max(groups.state.staleness), most_outstanding, most_taken, groups.state.dropped)


def still_wanted(groups: Groups, playing: list[tuple[float, Lease]], now: float) -> list[tuple[float, Lease]]:
    """What a heartbeat leaves of it."""
    cancelled = groups.heartbeat("worker", [held.lease_id for _, held in playing], now)
    lost = {one.lease_id for one in cancelled}
    return [(end, held) for end, held in playing if held.lease_id not in lost]


@pytest.mark.parametrize("slots", [3, 1000])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_lag_reaches_ceil_alpha_and_work_its_bound_and_neither_passes(alpha: float, slots: int) -> None:
    story = run(alpha, slots=slots)

    assert story.max_staleness == math.ceil(alpha)
    assert story.most_outstanding == math.floor((1 + alpha) * BATCH)
    assert story.dropped == {}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_redundant_groups_add_work_and_no_lag(alpha: float) -> None:
    story = run(alpha, slots=1000, redundant_groups=3)

    assert story.max_staleness == math.ceil(alpha)
    assert story.most_outstanding == math.floor((1 + alpha) * BATCH) + 3
    assert story.most_taken == BATCH
