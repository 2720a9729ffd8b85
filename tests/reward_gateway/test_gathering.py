import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_gateway.gathering import Comparison, Gathering
from rollfarm.errors import RewardFailed


def gathering(keep_seconds: float = 100.0, most_bytes: int = 1000) -> Gathering[str, str]:
    return Gathering(keep_seconds=keep_seconds, most_bytes=most_bytes)


def add(groups: Gathering[str, str], group: str, member: int, episode: str, size: int = 2, now: float = 0.0):
    return groups.add(group, member, size, episode, len(episode), now)


def test_a_group_is_compared_when_its_last_member_comes_whatever_the_order():
    groups = gathering()

    comparisons = [add(groups, "g", member, f"e{member}", size=3) for member in (2, 0, 1)]

    assert comparisons[:2] == [None, None]
    assert comparisons[2] == Comparison({0: "e0", 1: "e1", 2: "e2"}, frozenset({0, 1, 2}))


def test_groups_do_not_mix():
    groups = gathering()

    assert add(groups, "g", 0, "a") is None
    assert add(groups, "h", 1, "b") is None


def test_a_member_that_is_sent_again_replaces_itself():
    groups = gathering()
    add(groups, "g", 0, "first")

    again = add(groups, "g", 0, "second")
    complete = add(groups, "g", 1, "other")

    assert again is None
    assert complete == Comparison({0: "second", 1: "other"}, frozenset({0, 1}))
    assert groups.held_bytes == len("second") + len("other")


def test_a_member_that_is_sent_again_after_the_comparison_is_compared_with_the_others():
    groups = gathering()
    add(groups, "g", 0, "a")
    add(groups, "g", 1, "b")

    assert add(groups, "g", 1, "c") == Comparison({0: "a", 1: "c"}, frozenset({1}))


def test_late_redundant_members_are_compared_with_the_first_ones_and_not_with_each_other():
    groups = gathering()
    for member, episode in enumerate("ab"):
        add(groups, "g", member, episode)

    late = [add(groups, "g", member, f"late{member}") for member in (2, 3)]

    assert late == [
        Comparison({0: "a", 1: "b", 2: "late2"}, frozenset({2})),
        Comparison({0: "a", 1: "b", 3: "late3"}, frozenset({3})),
    ]
    assert groups.held_bytes == 2


def test_a_member_that_gives_another_size_is_refused():
    groups = gathering()
    add(groups, "g", 0, "a", size=4)

    with pytest.raises(RewardFailed, match="has 4 members by its first one, and 2 by member 1"):
        add(groups, "g", 1, "b", size=2)


def test_a_group_that_rests_too_long_is_forgotten():
    groups = gathering(keep_seconds=10)
    add(groups, "old", 0, "a", now=0.0)
    add(groups, "new", 0, "b", now=5.0)

    assert groups.forget(9.9) == []
    assert groups.forget(10.0) == ["old"]
    assert (groups.here("old"), groups.here("new"), groups.held_bytes) == (0, 1, 1)


def test_a_member_lets_its_group_rest_anew():
    groups = gathering(keep_seconds=10)
    add(groups, "g", 0, "a", size=3, now=0.0)
    add(groups, "g", 1, "b", size=3, now=8.0)

    assert groups.forget(12.0) == []
    assert groups.here("g") == 2


def test_what_is_too_much_goes_with_the_group_that_has_rested_longest():
    groups = gathering(most_bytes=10)
    add(groups, "a", 0, "xxxx")
    add(groups, "b", 0, "xxxx")
    add(groups, "a", 1, "xxxx", size=2)

    assert groups.forget(0.0) == ["b"]
    assert groups.held_bytes == 8


def test_one_group_alone_may_be_too_much():
    groups = gathering(most_bytes=10)
    add(groups, "a", 0, "x" * 20)

    assert groups.forget(0.0) == []


SENT = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(1, 6)), max_size=60)


@given(sent=SENT)
def test_every_comparison_has_the_members_that_it_judges_and_what_is_held_is_bounded(sent):
    groups = gathering(keep_seconds=7, most_bytes=20)

    for now, (group, member, size_bytes) in enumerate(sent):
        before = groups.here(group)
        comparison = groups.add(group, member, 3, f"{now}", size_bytes, float(now))
        groups.forget(float(now))

        if comparison is not None:
            assert comparison.episodes[member] == f"{now}"
            assert comparison.judged <= set(comparison.episodes)
            assert 3 <= len(comparison.episodes) <= 4
            assert (len(comparison.judged) == 3) == (before == 2)
        assert groups.held_bytes <= 20 or len(groups) == 1
