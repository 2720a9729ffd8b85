"""Group k is a pure function of (run seed, k)."""

from collections import Counter

import pytest

from rollfarm.v1 import sample_buffer_pb2
from sample_buffer import tasks, views
from tests.sample_buffer.support import fill, lease, make_groups, make_runs, make_spec, publish

WEIGHTED = (("a", "x", 5.0), ("b", "y", 1.0), ("c", "z", 1.0))


def test_domains_interleave_smoothly_by_weight() -> None:
    picks = tasks.spread(tasks.shares([5, 1, 1]), 7)

    assert [domain for domain, _ in picks] == [0, 0, 1, 0, 2, 0, 0]
    assert [index for domain, index in picks if domain == 0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("weights", [[0.4, 0.3, 0.3], [1e-3, 1.0], [3.3, 1.1, 7.7, 0.9]])
def test_every_prefix_holds_the_domains_in_the_ratio_of_their_weights(weights: list[float]) -> None:
    picks = tasks.spread(tasks.shares(weights), 500)

    for length in range(1, 501):
        seen = Counter(domain for domain, _ in picks[:length])
        for domain, weight in enumerate(weights):
            assert abs(seen[domain] - length * weight / sum(weights)) < len(weights)


def test_no_task_is_skipped_or_repeated() -> None:
    groups = make_groups(make_spec(domains=WEIGHTED, alpha=20.0, group_size=1))

    episodes = [views.episode_lease(groups, held).episode for held in lease(groups, 42)]

    for name, _, weight in WEIGHTED:
        assert [e.task.index for e in episodes if e.task.domain == name] == list(range(6 * int(weight)))


def test_a_run_that_failed_dropped_and_restarted_plays_the_same_groups() -> None:
    spec = make_spec(domains=WEIGHTED, alpha=20.0, group_size=1)
    smooth = make_groups(spec)
    expected = [views.episode_lease(smooth, held).episode.task for held in lease(smooth, 42)]

    runs = make_runs(spec)
    seen = {}
    while len(seen) < 42:
        groups = runs.run("")
        for held in lease(groups, 5):
            seen[held.position] = views.episode_lease(groups, held).episode.task
        fill(groups)
        publish(groups)
        snapshot, runs = runs.dump(), type(runs)()
        runs.load(snapshot)
        runs.resume(0.0)
        fill(runs.run(""))
        state = runs.run("").state
        for group in state.groups.values():
            seen[group.index] = tasks.task(spec, group.domain, group.task_index)

    assert [seen[index] for index in range(42)] == expected


def test_seeds_are_stable_across_releases() -> None:
    assert tasks.seed_of(7, "maths", 0, validation=False) == 5394824209404525892
    assert tasks.seed_of(7, "maths", 0, validation=True) == 6774733767530163247


def test_training_and_validation_seeds_never_meet() -> None:
    training = {tasks.seed_of(1, "d", index, validation=False) % 2 for index in range(100)}
    validation = {tasks.seed_of(1, "d", index, validation=True) % 2 for index in range(100)}

    assert (training, validation) == ({0}, {1})
    assert all(0 <= tasks.seed_of(1, "d", index, validation=True) < 2**63 for index in range(100))


def test_a_run_that_evaluates_plays_the_tasks_that_validation_shows():
    spec = sample_buffer_pb2.RunSpec(seed=3, domains=[sample_buffer_pb2.Domain(name="a", environment="e")])
    held_out = sample_buffer_pb2.RunSpec(held_out=True)
    held_out.MergeFrom(spec)

    assert tasks.task(held_out, 0, 5) == tasks.task(spec, 0, 5, validation=True)
    assert tasks.task(held_out, 0, 5).seed % 2 == 1
    assert tasks.task(spec, 0, 5).seed % 2 == 0
