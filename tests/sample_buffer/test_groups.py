"""The ledger of one run, command by command."""

import pytest

from rollfarm.errors import (
    InvalidArgument,
    LeaseExpired,
    StepOutOfOrder,
    UnknownBatch,
    UnknownValidation,
    VersionOutOfOrder,
)
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import views
from sample_buffer.fold import ahead
from sample_buffer.groups import Groups
from sample_buffer.state import Lease
from tests.sample_buffer.support import complete, fill, lease, make_groups, make_spec, play, publish, request_id

ACCEPTED, SURPLUS, STALE = pb.DISPOSITION_ACCEPTED, pb.DISPOSITION_SURPLUS, pb.DISPOSITION_STALE


def fail(
    groups: Groups, held: Lease, outcome: "tp.Outcome.ValueType" = tp.OUTCOME_ENV_FAILED, *, now: float = 0.0
) -> bool:
    return groups.fail(request_id(), held.lease_id, outcome, "it broke", now)


def take(groups: Groups, step: int) -> list[int]:
    taken = groups.take(step, 0.0)
    return taken[0].groups if taken else []


def commit(groups: Groups, step: int) -> int:
    return groups.commit(request_id(), step, groups.fold.batch_id(step), 0.0)


@pytest.mark.parametrize(("alpha", "groups_out"), [(0.0, 2), (0.5, 3), (1.0, 4), (1.9, 5)])
def test_no_more_groups_are_admitted_than_there_are_credits(alpha: float, groups_out: int) -> None:
    groups = make_groups(make_spec(alpha=alpha))

    leases = lease(groups)

    assert len(leases) == 2 * groups_out
    assert (groups.credits_in_use, groups.capacity) == (groups_out, groups_out)
    assert lease(groups) == []


@pytest.mark.parametrize(
    ("alpha", "batch_groups", "bounds"),
    [(0.0, 8, (8, 0)), (0.5, 3, (4, 1)), (1.0, 8, (16, 1)), (1.01, 8, (16, 2)), (0.13, 100, (113, 1))],
)
def test_alpha_bounds_what_is_outstanding_and_how_far_it_lags(
    alpha: float, batch_groups: int, bounds: tuple[int, int]
) -> None:
    assert ahead(alpha, batch_groups) == bounds


def test_a_credit_is_free_only_when_a_version_trained_on_its_step_is_published() -> None:
    groups = make_groups(make_spec(alpha=0.0))
    publish(groups)
    fill(groups)

    assert take(groups, 0) == [0, 1]
    assert lease(groups) == []
    commit(groups, 0)
    assert lease(groups) == []
    publish(groups, trained=1)

    assert [held.position for held in lease(groups)] == [2, 2, 3, 3]


def test_alpha_0_trains_every_batch_on_the_version_that_played_it() -> None:
    groups = make_groups(make_spec(alpha=0.0))
    publish(groups)

    for step in range(4):
        fill(groups)
        take(groups, step)
        publish(groups, trained=step + 1)

    assert groups.state.staleness == {0: 16}


def test_nothing_is_admitted_beyond_what_the_remaining_steps_need() -> None:
    groups = make_groups(make_spec(alpha=3.0, steps=3))

    assert len(lease(groups)) == 2 * 6
    assert groups.capacity == 6


def test_a_run_at_its_end_leases_nothing_and_refuses_further_steps() -> None:
    groups = make_groups(make_spec(alpha=1.0, steps=1))
    fill(groups)
    take(groups, 0)
    publish(groups, trained=1)

    assert lease(groups) == []
    assert groups.capacity == 0
    with pytest.raises(StepOutOfOrder, match="has 1 steps"):
        groups.take(1, 0.0)


def test_members_of_a_group_share_task_and_seed_and_groups_never_mix() -> None:
    groups = make_groups(make_spec())

    episodes = [views.episode_lease(groups, held).episode for held in lease(groups)]

    assert [episode.group_id for episode in episodes] == ["run-g0"] * 2 + ["run-g1"] * 2 + ["run-g2"] * 2 + [
        "run-g3"
    ] * 2
    assert [episode.member for episode in episodes] == [0, 1] * 4
    for first, second in zip(episodes[::2], episodes[1::2], strict=True):
        assert first.task == second.task
    assert len({episode.task.seed for episode in episodes}) == 4


def test_a_worker_gets_only_what_it_can_play_and_the_rest_waits_for_another() -> None:
    groups = make_groups(make_spec(domains=[("a", "sums", 1.0), ("b", "maze", 1.0)]))

    mazes = lease(groups, worlds=["maze"])
    sums = lease(groups, worlds=["sums", "chess"])

    assert [held.position for held in mazes] == [1, 1, 3, 3]
    assert [held.position for held in sums] == [0, 0, 2, 2]


def test_retries_of_the_oldest_group_go_before_new_groups() -> None:
    groups = make_groups(make_spec())
    first = lease(groups, 5)
    fail(groups, first[3])
    fail(groups, first[0])

    again = lease(groups, 4)

    assert [(held.position, held.member, held.attempt) for held in again] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 1, 1),
        (3, 0, 1),
    ]


def test_a_member_that_fails_too_often_drops_its_group_and_returns_the_credit() -> None:
    groups = make_groups(make_spec(max_attempts=2))
    held, sibling = lease(groups, 2)

    assert fail(groups, held) is True
    assert fail(groups, lease(groups, 1)[0]) is False

    assert groups.state.dropped == {"failed": 1}
    assert groups.credits_in_use == 0
    assert complete(groups, sibling) == SURPLUS
    assert lease(groups, 1)[0].position == 1


def test_giving_an_episode_back_as_cancelled_costs_no_attempt() -> None:
    groups = make_groups(make_spec(max_attempts=1))

    retried = [fail(groups, lease(groups, 1)[0], tp.OUTCOME_CANCELLED) for _ in range(5)]

    assert retried == [True] * 5


def test_a_redundant_member_that_gives_up_does_not_drop_its_group() -> None:
    groups = make_groups(make_spec(redundant_members=1, max_attempts=1))
    first, second, third = lease(groups, 3)

    assert fail(groups, first) is False
    complete(groups, second)
    complete(groups, third)

    assert list(groups.fold.ready) == [0]


def test_the_first_members_win_and_the_others_are_cancelled() -> None:
    groups = make_groups(make_spec(redundant_members=1))
    first, second, third = lease(groups, 3)
    complete(groups, third)
    complete(groups, first)

    cancelled = groups.heartbeat("worker", [second.lease_id], 0.0)

    assert [(one.lease_id, one.outcome) for one in cancelled] == [(second.lease_id, tp.OUTCOME_CANCELLED)]
    assert complete(groups, second) == SURPLUS
    assert [member.lease_id for member in groups.state.groups[0].done()] == [first.lease_id, third.lease_id]


def test_a_silent_worker_loses_its_lease_and_a_heartbeat_keeps_it() -> None:
    groups = make_groups(make_spec(lease_seconds=10))
    silent, alive = lease(groups, 2, now=0.0)
    groups.heartbeat("worker", [alive.lease_id], 9.0)

    assert groups.tick(9.9) == 0
    assert groups.tick(10.0) == 1

    assert lease(groups, 1, now=10.0)[0].attempt == 2
    with pytest.raises(LeaseExpired):
        complete(groups, silent, now=11.0)
    with pytest.raises(LeaseExpired):
        fail(groups, silent)
    assert complete(groups, alive, now=18.0) == ACCEPTED


def test_a_heartbeat_learns_of_leases_that_are_unknown_or_another_workers() -> None:
    groups = make_groups(make_spec())
    (held,) = lease(groups, 1)

    answered = groups.heartbeat("thief", [held.lease_id, "nonce-99"], 0.0)

    assert [one.lease_id for one in answered] == [held.lease_id, "nonce-99"]
    assert groups.heartbeat("worker", [held.lease_id], 0.0) == []


def test_an_episode_that_is_too_old_when_it_completes_is_leased_again() -> None:
    groups = make_groups(make_spec(alpha=1.0))
    for _ in range(3):
        publish(groups)
    (held,) = lease(groups, 1)

    assert complete(groups, held, versions=[3, 1, 2]) == STALE

    assert groups.state.outcomes == {tp.OUTCOME_STALE: 1}
    assert (lease(groups, 1)[0].position, lease(groups, 1)[0].position) == (0, 0)


def test_a_new_version_drops_groups_and_cancels_leases_that_it_makes_too_old() -> None:
    groups = make_groups(make_spec(alpha=1.0))
    leases = lease(groups)
    complete(groups, leases[0])
    complete(groups, leases[1])
    complete(groups, leases[2])

    assert publish(groups) == 0
    assert publish(groups) == 2

    assert groups.state.dropped == {"stale": 2}
    answered = groups.heartbeat("worker", [held.lease_id for held in leases[3:]], 0.0)
    assert {one.outcome for one in answered} == {tp.OUTCOME_STALE}
    assert complete(groups, leases[4]) == STALE
    assert [(held.position, held.version) for held in lease(groups, 5)] == [(2, 2), (2, 2), (3, 2), (3, 2), (4, 2)]


def test_the_oldest_ready_groups_are_taken_first() -> None:
    groups = make_groups(make_spec(alpha=1.0))
    leases = lease(groups)
    for held in reversed(leases):
        complete(groups, held)

    assert take(groups, 0) == [0, 1]
    assert take(groups, 1) == [2, 3]


def test_an_uncommitted_batch_is_delivered_again_and_a_committed_one_never() -> None:
    groups = make_groups(make_spec(alpha=2.0))
    fill(groups)
    first = groups.take(0, 0.0)
    take(groups, 1)

    assert first is not None
    assert groups.take(0, 0.0) == (first[0], True)
    assert commit(groups, 1) == 2
    with pytest.raises(StepOutOfOrder) as refused:
        groups.take(0, 0.0)
    assert refused.value.facts["next_step"] == "2"


def test_steps_are_taken_in_order() -> None:
    groups = make_groups(make_spec())

    with pytest.raises(StepOutOfOrder):
        groups.take(1, 0.0)
    assert groups.take(0, 0.0) is None


def test_committing_is_idempotent_and_needs_a_delivered_batch() -> None:
    groups = make_groups(make_spec())
    fill(groups)
    with pytest.raises(UnknownBatch):
        commit(groups, 0)
    take(groups, 0)
    with pytest.raises(UnknownBatch):
        groups.commit(request_id(), 0, "another", 0.0)

    assert [commit(groups, 0), commit(groups, 0)] == [1, 1]
    assert groups.state.committed_trajectories == 4


def test_a_commit_that_changed_nothing_is_answered_by_what_is_committed_now() -> None:
    groups = make_groups(make_spec())
    for step in range(2):
        fill(groups)
        take(groups, step)

    def commit_the_first_once_more() -> int:
        return groups.commit("once more", 0, groups.fold.batch_id(0), 0.0)

    commit(groups, 0)
    before = commit_the_first_once_more()
    commit(groups, 1)

    assert (before, commit_the_first_once_more()) == (1, 2)


def test_versions_are_published_one_by_one_and_never_trained_on_the_future() -> None:
    groups = make_groups(make_spec())

    with pytest.raises(VersionOutOfOrder) as refused:
        groups.publish(request_id(), 2, 0, 0.0)
    with pytest.raises(InvalidArgument):
        groups.publish(request_id(), 1, 1, 0.0)

    assert refused.value.facts == {"policy_version": "2", "newest_version": "0"}


def test_a_trainer_that_fell_back_to_a_checkpoint_frees_no_credit_twice() -> None:
    groups = make_groups(make_spec(alpha=1.0))
    publish(groups)
    fill(groups)
    take(groups, 0)
    publish(groups, trained=1)
    fill(groups)
    before = groups.credits_in_use

    publish(groups, trained=0)
    take(groups, 0)
    publish(groups, trained=1)

    assert groups.credits_in_use <= before <= groups.capacity
    assert groups.state.version == 4


def test_validation_goes_first_needs_no_credit_and_means_what_it_measured() -> None:
    groups = make_groups(make_spec(alpha=0.0, domains=[("a", "sums", 1.0), ("b", "maze", 1.0)]))
    training = lease(groups)
    groups.start_validation(request_id(), "v0", 4, 0.0)

    held = lease(groups, 100)
    for one, reward in zip(held, [1.0, 0.0, 0.5, 0.0], strict=True):
        complete(groups, one, reward=reward)
    results = views.validation_results(groups, "v0")

    assert len(training) == 4
    assert [one.validation_id for one in held] == ["v0"] * 4
    assert results.finished
    assert [(one.domain, one.episode_count, one.mean_reward) for one in results.results] == [
        ("a", 2, 0.75),
        ("b", 2, 0),
    ]
    assert dict(results.results[0].mean_metrics) == {"success": 1.0, "turns": 2.0}
    assert groups.credits_in_use == 2


def test_validation_plays_the_same_tasks_every_time_and_none_of_training() -> None:
    groups = make_groups(make_spec(alpha=100.0))
    training = {views.episode_lease(groups, held).episode.task.seed for held in lease(groups, 404)}

    def tasks_of(validation_id: str) -> list[tp.Task]:
        groups.start_validation(request_id(), validation_id, 50, 0.0)
        return [views.episode_lease(groups, held).episode.task for held in lease(groups, 50)]

    first, second = tasks_of("v0"), tasks_of("v1")

    assert first == second
    assert not training & {task.seed for task in first}
    assert len({task.seed for task in first}) == 50


def test_a_validation_episode_that_gives_up_is_in_no_mean() -> None:
    groups = make_groups(make_spec(max_attempts=1))
    groups.start_validation(request_id(), "v0", 2, 0.0)
    lost, played = lease(groups, 2)
    fail(groups, lost)

    assert not views.validation_results(groups, "v0").finished
    complete(groups, played, reward=1.0)
    (result,) = views.validation_results(groups, "v0").results

    assert (result.episode_count, result.failed_count, result.mean_reward) == (1, 1, 1.0)


def test_a_validation_is_asked_for_once() -> None:
    groups = make_groups(make_spec())
    groups.start_validation(request_id(), "v0", 2, 0.0)
    groups.start_validation(request_id(), "v0", 2, 0.0)

    assert groups.state.validation_count == 1
    with pytest.raises(InvalidArgument, match="exists with 2"):
        groups.start_validation(request_id(), "v0", 3, 0.0)
    with pytest.raises(InvalidArgument):
        groups.start_validation(request_id(), "v1", 0, 0.0)
    with pytest.raises(UnknownValidation):
        groups.validation("v9")


def test_a_repeated_request_gets_its_first_answer() -> None:
    groups = make_groups(make_spec(alpha=0.0))
    first = groups.lease("one", "worker", 1, [], 0.0)
    episode = views.episode_lease(groups, first[0]).episode

    assert groups.lease("one", "worker", 1, [], 5.0) == first
    kept = [groups.complete("two", first[0].lease_id, play(episode), 0.0) for _ in range(2)]
    assert kept == [(ACCEPTED, True), (ACCEPTED, False)]
    (other,) = groups.lease("three", "worker", 1, [], 0.0)
    assert [groups.fail("four", other.lease_id, tp.OUTCOME_ABORTED, "", 0.0) for _ in range(2)] == [True, True]
    assert [groups.publish("five", 1, 0, 0.0) for _ in range(2)] == [1, 1]
    assert groups.state.version == 1
    assert groups.lease("one", "worker", 1, [], 9.0) == first


def test_a_repeated_request_for_a_validation_that_is_forgotten_does_not_begin_it_again() -> None:
    groups = make_groups(make_spec())
    for number in range(groups.fold.limits.kept_validations + 1):
        groups.start_validation(f"request {number}", f"v{number}", 1, 0.0)
        complete(groups, lease(groups, 1)[0])
    groups.start_validation("one more", "v99", 1, 0.0)

    groups.start_validation("request 0", "v0", 1, 0.0)

    assert "v0" not in groups.state.validations
    assert groups.state.validation_count == groups.fold.limits.kept_validations + 2


def test_only_so_many_answers_are_remembered() -> None:
    groups = make_groups(make_spec(alpha=9.0), remembered=3)

    for number in range(5):
        groups.lease(str(number), "worker", 1, [], 0.0)

    assert list(groups.state.answers) == ["lease/2", "lease/3", "lease/4"]


@pytest.mark.parametrize(("request_name", "worker", "most"), [("", "w", 1), ("r", "", 1), ("r", "w", 0)])
def test_a_lease_needs_a_request_a_worker_and_a_number(request_name: str, worker: str, most: int) -> None:
    with pytest.raises(InvalidArgument):
        make_groups(make_spec()).lease(request_name, worker, most, [], 0.0)


def test_an_outcome_that_is_no_failure_is_refused() -> None:
    groups = make_groups(make_spec())
    (held,) = lease(groups, 1)

    with pytest.raises(InvalidArgument, match="OUTCOME_ENV_FAILED"):
        fail(groups, held, tp.OUTCOME_OK)


def test_payloads_of_the_oldest_retired_groups_become_garbage() -> None:
    groups = make_groups(make_spec(), retained=4)
    for step in range(3):
        fill(groups)
        take(groups, step)
        publish(groups, trained=step + 1)
        commit(groups, step)

    assert sorted(groups.fold.garbage) == sorted(f"nonce-{number}" for number in range(8))
    assert groups.state.retired_trajectories == 4
    assert len(groups.state.finished) == 8


def test_a_lease_that_its_worker_handed_in_is_none_to_cancel() -> None:
    groups = make_groups(make_spec())
    done, given_back = lease(groups, 2)
    complete(groups, done)
    fail(groups, given_back)

    assert groups.heartbeat("worker", [done.lease_id, given_back.lease_id], 0.0) == []
