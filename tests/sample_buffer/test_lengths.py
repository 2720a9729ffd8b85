"""What was dropped shows by quarters of length: speed that is bought by dropping long episodes is a bias."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rollfarm.v1 import sample_buffer_pb2 as pb
from sample_buffer import lengths, views
from sample_buffer.groups import Groups
from sample_buffer.metrics import StateCollector
from tests.sample_buffer.support import lease, make_runs, make_spec, play, publish, request_id


def finish(groups: Groups, *token_counts: int) -> None:
    """Complete one episode of each length."""
    for held, tokens in zip(lease(groups, len(token_counts)), token_counts, strict=True):
        episode = views.episode_lease(groups, held).episode
        groups.complete(request_id(), held.lease_id, play(episode, tokens=tokens), 0.0)


def numbers(quarter: pb.LengthQuartile) -> tuple[int, int, dict[str, int]]:
    return quarter.max_token_count, quarter.episode_count, dict(quarter.dropped_counts)


@pytest.mark.parametrize(
    ("tokens", "rounded"), [(0, 0), (1, 1), (15, 15), (16, 16), (17, 18), (31, 32), (32, 32), (33, 36), (1000, 1024)]
)
def test_a_length_is_rounded_up_by_an_eighth_at_most(tokens: int, rounded: int) -> None:
    assert lengths.rounded(tokens) == rounded


@given(st.integers(0, 1 << 40))
def test_rounding_up_keeps_buckets_apart_and_small(tokens: int) -> None:
    rounded = lengths.rounded(tokens)

    assert tokens <= rounded <= tokens * 9 / 8
    assert lengths.rounded(rounded) == rounded
    assert lengths.rounded(tokens + 1) >= rounded


def test_what_a_new_version_drops_shows_in_the_quarters_of_its_lengths() -> None:
    runs = make_runs(make_spec(alpha=0.0, batch_groups=4))
    groups = runs.run("")
    finish(groups, 2, 3, 5, 7, 2, 3, 90, 100)

    publish(groups)
    status = views.status(groups, 0.0)

    assert dict(status.dropped_group_counts) == {"stale": 4}
    assert [numbers(quarter) for quarter in status.length_quartiles] == [
        (2, 2, {"stale": 2}),
        (3, 2, {"stale": 2}),
        (7, 2, {"stale": 2}),
        (104, 2, {"stale": 2}),
    ]


def test_long_episodes_that_are_dropped_show_in_the_last_quarter_alone() -> None:
    quarters = lengths.quartiles({10: 60, 20: 20, 100: 20}, {"max_length": {100: 20}, "failed": {10: 6}})

    assert [numbers(quarter) for quarter in quarters] == [
        (10, 25, {"failed": 2}),
        (10, 25, {"failed": 3}),
        (20, 25, {"failed": 1}),
        (100, 25, {"max_length": 20}),
    ]


def test_there_are_no_quarters_before_the_first_episode_and_four_after_it() -> None:
    runs = make_runs(make_spec())
    groups = runs.run("")

    assert list(views.status(groups, 0.0).length_quartiles) == []
    finish(groups, 5)

    assert [quarter.episode_count for quarter in views.status(groups, 0.0).length_quartiles] == [0, 0, 0, 1]


@given(
    st.dictionaries(st.integers(0, 500).map(lengths.rounded), st.integers(1, 50), min_size=1),
    st.randoms(use_true_random=False),
)
def test_quarters_lose_no_episode(finished: dict[int, int], random: Random) -> None:
    dropped = {"stale": {length: random.randint(0, count) for length, count in finished.items()}}

    quarters = lengths.quartiles(finished, dropped)

    sizes = [quarter.episode_count for quarter in quarters]
    lost = sum((Counter(quarter.dropped_counts) for quarter in quarters), Counter())
    assert (sum(sizes), max(sizes) - min(sizes) <= 1) == (sum(finished.values()), True)
    assert lost.total() == sum(dropped["stale"].values())
    assert all(quarter.dropped_counts["stale"] <= quarter.episode_count for quarter in quarters)
    assert [q.max_token_count for q in quarters] == sorted(q.max_token_count for q in quarters)


def test_metrics_have_the_quarters_of_length() -> None:
    runs = make_runs(make_spec(alpha=0.0))
    finish(runs.run(""), 4, 4, 8, 8)
    publish(runs.run(""))
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: runs))

    name = "rollfarm_sample_buffer_length_quartile_"

    assert registry.get_sample_value(f"{name}tokens", {"quartile": "4"}) == 8
    assert registry.get_sample_value(f"{name}episodes", {"quartile": "1"}) == 1
    assert registry.get_sample_value(f"{name}dropped", {"quartile": "1", "reason": "stale"}) == 1
