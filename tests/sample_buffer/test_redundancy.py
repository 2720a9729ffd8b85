"""More is played than is trained on: the first to be complete win, and the others cost nobody anything but work."""

import pytest

from rollfarm.v1 import sample_buffer_pb2 as pb
from sample_buffer import views
from sample_buffer.groups import Groups
from sample_buffer.state import Lease
from tests.sample_buffer.support import complete, fill, lease, make_groups, make_spec, publish


def take(groups: Groups, step: int) -> list[int]:
    taken = groups.take(step, 0.0)
    return taken[0].groups if taken else []


def of(leases: list[Lease], index: int) -> list[Lease]:
    return [held for held in leases if held.position == index]


def test_redundant_groups_are_admitted_beside_those_that_alpha_allows() -> None:
    groups = make_groups(make_spec(alpha=0.5, redundant_groups=2))

    leases = lease(groups)

    assert {held.position for held in leases} == {0, 1, 2, 3, 4}
    assert (groups.credits_in_use, groups.capacity) == (5, 5)


def test_the_first_groups_win_and_at_alpha_0_the_others_are_dropped_at_the_take() -> None:
    groups = make_groups(make_spec(alpha=0.0, redundant_groups=2))
    leases = lease(groups)
    for held in [*of(leases, 3), *of(leases, 1), *of(leases, 2)[:1]]:
        complete(groups, held)
    open_still = of(leases, 0)[0]

    assert take(groups, 0) == [1, 3]

    assert groups.state.dropped == {"redundant": 2}
    assert [one.detail for one in groups.heartbeat("worker", [open_still.lease_id], 0.0)] == [
        "its group was completed or dropped"
    ]
    assert complete(groups, open_still) == pb.DISPOSITION_SURPLUS


def test_a_ready_group_that_is_left_over_at_alpha_0_is_dropped_too() -> None:
    groups = make_groups(make_spec(alpha=0.0, redundant_groups=1))
    fill(groups)

    assert take(groups, 0) == [0, 1]

    assert groups.state.dropped == {"redundant": 1}
    assert not groups.fold.ready


def test_at_alpha_0_nothing_is_admitted_between_the_take_and_the_publication() -> None:
    groups = make_groups(make_spec(alpha=0.0, redundant_groups=3))
    fill(groups)
    take(groups, 0)

    assert lease(groups) == []
    assert (groups.credits_in_use, groups.capacity) == (2, 2)
    publish(groups, trained=1)

    assert {held.position for held in lease(groups)} == {5, 6, 7, 8, 9}


def test_with_alpha_above_0_what_is_left_over_goes_on_while_it_is_fresh() -> None:
    groups = make_groups(make_spec(alpha=1.0, redundant_groups=1))
    fill(groups)

    taken = [take(groups, 0), take(groups, 1)]

    assert taken == [[0, 1], [2, 3]]
    assert lease(groups) == []
    assert groups.state.dropped == {}
    publish(groups, trained=1)
    fill(groups)
    publish(groups, trained=2)
    assert groups.state.dropped == {"stale": 1}


def test_redundant_groups_let_the_trainer_run_no_further_ahead() -> None:
    groups = make_groups(make_spec(alpha=0.5, redundant_groups=5))
    fill(groups)

    assert len(groups.fold.ready) == 8
    assert [take(groups, 0), take(groups, 1)] == [[0, 1], []]
    publish(groups, trained=1)

    assert take(groups, 1) == [2, 3]


def test_what_the_last_step_leaves_over_is_dropped() -> None:
    groups = make_groups(make_spec(alpha=1.0, steps=2, redundant_groups=1))
    fill(groups)

    assert [take(groups, 0), take(groups, 1)] == [[0, 1], [2, 3]]

    assert groups.state.dropped == {"redundant": 1}
    assert lease(groups) == []


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_status_tells_how_many_groups_may_be_outstanding(alpha: float) -> None:
    groups = make_groups(make_spec(alpha=alpha, redundant_groups=2))
    plain = make_groups(make_spec(alpha=alpha))

    assert views.status(groups, 0.0).credit_count == views.status(plain, 0.0).credit_count + 2
