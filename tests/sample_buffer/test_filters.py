"""Filters on complete groups: what each keeps, which settings it takes, and what a dropped group leaves behind."""

import math
from collections.abc import Sequence

import pytest

from rollfarm.config import ConfigError
from rollfarm.errors import InvalidArgument
from rollfarm.run import DomainConfig, FilterConfig, RunConfig
from rollfarm.v1 import sample_buffer_pb2 as pb
from sample_buffer import events, filters
from sample_buffer.config import SampleBufferRoot
from sample_buffer.filters import Candidate
from sample_buffer.runs import Runs
from tests.sample_buffer.support import complete, lease, make_groups, make_runs, make_spec, publish


def candidate(rewards: Sequence[float] = (0.0, 1.0), lengths: Sequence[int] = (1, 1)) -> Candidate:
    return Candidate(rewards, lengths, step=0, seen={})


def kept(name: str, group: Candidate, **settings: float) -> bool:
    refused, _ = filters.judge([pb.Filter(name=name, settings=settings)], group)
    return refused == ""


@pytest.mark.parametrize(
    ("settings", "lengths", "keeps"),
    [
        ({"tokens": 10}, (10, 10, 10, 10), True),
        ({"tokens": 10}, (10, 11, 10, 10), False),
        ({"tokens": 10, "share": 0.25}, (10, 11, 10, 10), True),
        ({"tokens": 10, "share": 0.25}, (10, 11, 11, 10), False),
        ({"tokens": 10, "share": 1}, (11, 11, 11, 11), True),
    ],
)
def test_max_length_drops_a_group_with_too_many_long_members(
    settings: dict[str, float], lengths: tuple[int, ...], keeps: bool
) -> None:
    assert kept("max_length", candidate(lengths=lengths), **settings) is keeps


@pytest.mark.parametrize(
    ("settings", "rewards", "keeps"),
    [
        ({}, (0.0, -1.0), False),
        ({}, (0.0, 0.1), True),
        ({"threshold": 0.5}, (0.5, 0.2), False),
        ({"threshold": -1}, (-0.5, -2.0), True),
    ],
)
def test_all_failed_drops_a_group_in_which_no_reward_exceeds_the_threshold(
    settings: dict[str, float], rewards: tuple[float, ...], keeps: bool
) -> None:
    assert kept("all_failed", candidate(rewards), **settings) is keeps


@pytest.mark.parametrize(
    ("reward", "pool"), [(0.91, "easy"), (0.9, "normal"), (0.5, "normal"), (0.1, "normal"), (0.09, "hard")]
)
def test_a_group_is_easy_normal_or_hard_by_its_mean_reward(reward: float, pool: str) -> None:
    chosen = pb.Filter(name="pools", settings={"easy_above": 0.9, "hard_below": 0.1})

    refused, found = filters.judge([chosen], candidate((reward - 0.05, reward + 0.05)))

    assert (refused, found) == ("" if pool == "normal" else "pools", pool)


def test_a_share_of_a_pool_is_kept_evenly_spread() -> None:
    settings = {"easy_above": 0.9, "easy_share": 0.4}

    keeps = [kept("pools", Candidate([1.0], [1], step=0, seen={"easy": n}), **settings) for n in range(10)]

    assert keeps == [False, False, True, False, True] * 2


def test_pools_that_have_no_share_are_dropped_and_those_with_all_of_it_kept() -> None:
    settings = {"easy_above": 0.9, "hard_below": 0.1, "hard_share": 1.0}

    assert not kept("pools", candidate([1.0]), **settings)
    assert kept("pools", candidate([0.0]), **settings)


def test_the_hard_share_grows_over_the_first_batches() -> None:
    settings = {"hard_below": 0.5, "hard_share": 0.5, "ramp_steps": 4}

    shares = [
        sum(kept("pools", Candidate([0.0], [1], step=step, seen={"hard": n}), **settings) for n in range(80)) / 80
        for step in (0, 1, 2, 4, 9)
    ]

    assert shares == [0.0, 0.125, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("max_length", {}, "'max_length': tokens: Field required"),
        ("max_length", {"tokens": 0}, "tokens: Input should be greater than or equal to 1"),
        ("max_length", {"tokens": 1.5}, "tokens: Input should be a valid integer"),
        ("max_length", {"tokens": 9, "share": 1.1}, "share: Input should be less than or equal to 1"),
        ("pools", {"easy_share": -0.1}, "easy_share: Input should be greater than or equal to 0"),
        ("pools", {"hard_share": 2}, "hard_share: Input should be less than or equal to 1"),
        ("pools", {"ramp_steps": -1}, "ramp_steps: Input should be greater than or equal to 0"),
        ("pools", {"easy_above": 0.1, "hard_below": 0.9}, "hard_below exceeds easy_above"),
        ("difficulty", {"min_mean": 1, "max_mean": 0}, "min_mean exceeds max_mean"),
        ("zero_variance", {"tolerance": -1}, "tolerance: Input should be greater than or equal to 0"),
        ("all_failed", {"threshold": math.nan}, "threshold is not a number"),
        ("all_failed", {"treshold": 1}, "has no setting 'treshold'. Did you mean 'threshold'"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        filters.check([pb.Filter(name=name, settings=settings)])


def test_a_filter_is_there_once() -> None:
    with pytest.raises(InvalidArgument, match="'pools' is there twice"):
        filters.check([pb.Filter(name="pools"), pb.Filter(name="all_failed"), pb.Filter(name="pools")])


def test_a_wrong_setting_is_refused_when_the_configuration_is_read() -> None:
    run = RunConfig(
        domains=[DomainConfig(name="maths", environment="sums")],
        filters=[FilterConfig(name="max_length", settings={"tokens": -3})],
    )

    with pytest.raises(ConfigError, match=r"run\.filters: Filter 'max_length': tokens"):
        SampleBufferRoot(run=run).check()


@pytest.mark.parametrize(
    ("filter_config", "rewards", "reason"),
    [
        (FilterConfig(name="zero_variance"), (1.0, 1.0), "zero_variance"),
        (FilterConfig(name="zero_variance"), (1.0, 0.0), None),
        (FilterConfig(name="zero_variance", settings={"tolerance": 0.5}), (1.0, 0.5), "zero_variance"),
        (FilterConfig(name="difficulty", settings={"min_mean": 0.3}), (0.5, 0.0), "difficulty"),
        (FilterConfig(name="difficulty", settings={"max_mean": 0.7}), (1.0, 0.5), "difficulty"),
        (FilterConfig(name="difficulty", settings={"min_mean": 0.3, "max_mean": 0.7}), (1.0, 0.0), None),
        (FilterConfig(name="max_length", settings={"tokens": 2}), (1.0, 0.0), "max_length"),
        (FilterConfig(name="max_length", settings={"tokens": 3}), (1.0, 0.0), None),
        (FilterConfig(name="all_failed"), (0.0, 0.0), "all_failed"),
        (FilterConfig(name="pools", settings={"hard_below": 0.6}), (1.0, 0.0), "pools"),
    ],
)
def test_a_filtered_group_is_dropped_and_its_credit_returns(
    filter_config: FilterConfig, rewards: tuple[float, float], reason: str | None
) -> None:
    groups = make_groups(make_spec(filters=[filter_config]))
    for held, reward in zip(lease(groups, 2), rewards, strict=True):
        complete(groups, held, reward=reward)

    assert groups.state.dropped == ({reason: 1} if reason else {})
    assert groups.credits_in_use == (0 if reason else 1)
    assert list(groups.fold.ready) == ([] if reason else [0])


def test_a_filtered_group_is_replaced_by_one_of_the_current_version() -> None:
    groups = make_groups(make_spec(alpha=1.0, filters=[FilterConfig(name="zero_variance")]))
    first = lease(groups)
    publish(groups)

    for held in first[:2]:
        complete(groups, held)

    assert {(held.position, held.version) for held in lease(groups)} == {(4, 1)}


def test_pools_count_what_reaches_them_and_a_replay_counts_the_same() -> None:
    chosen = [
        FilterConfig(name="all_failed"),
        FilterConfig(name="pools", settings={"easy_above": 0.9, "easy_share": 0.5}),
    ]
    runs = make_runs(make_spec(batch_groups=8, alpha=0.0, group_size=1, filters=chosen))
    groups = runs.run("")

    for held, reward in zip(lease(groups), [1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 1.0], strict=True):
        complete(groups, held, reward=reward)
    again = Runs()
    for event in events.decode(events.encode(runs.outbox)):
        again.apply(event)

    assert list(groups.fold.ready) == [2, 3, 6]
    assert groups.state.pools == {"easy": 5, "normal": 1}
    assert groups.state.dropped == {"pools": 3, "all_failed": 2}
    assert again.dump() == runs.dump()
