"""Workers that want nothing of an environment, because it fails."""

from sample_buffer.groups import Groups
from sample_buffer.state import Lease
from tests.sample_buffer.support import complete, lease, make_groups, make_spec, publish, request_id

TWO_WORLDS = (("maths", "sums", 1.0), ("mazes", "maze", 1.0))


def exclude(groups: Groups, *worlds: str, now: float = 0.0) -> list[Lease]:
    return groups.lease(request_id(), "worker", 100, [], now, excluded=worlds)


def test_an_excluded_environment_is_not_leased_and_waits_where_it_was() -> None:
    groups = make_groups(make_spec(domains=TWO_WORLDS))

    without = exclude(groups, "maze")

    assert {held.position for held in without} == {0, 2}
    assert {held.position for held in lease(groups)} == {1, 3}


def test_a_broken_environment_gives_its_credits_to_the_others_after_the_time_of_a_lease() -> None:
    groups = make_groups(make_spec(domains=TWO_WORLDS, lease_seconds=10))
    for held in exclude(groups, "maze"):
        complete(groups, held, reward=float(held.member))
    assert groups.take(0, 0.0)
    publish(groups, trained=1)
    for held in exclude(groups, "maze", now=1.0):
        complete(groups, held, reward=float(held.member))

    early = exclude(groups, "maze", now=9.0)
    late = exclude(groups, "maze", now=10.0)

    assert (early, {held.position for held in late}) == ([], {6})
    assert groups.state.dropped == {"failed": 2}
    assert [note.detail for note in groups.state.groups[5].history] == [""]


def test_where_every_environment_is_broken_their_groups_wait_for_them() -> None:
    groups = make_groups(make_spec(domains=TWO_WORLDS, lease_seconds=10))
    lease(groups, 1)

    assert exclude(groups, "maze", "sums", now=100.0) == []
    assert groups.state.dropped == {}
