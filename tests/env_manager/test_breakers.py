"""An environment that fails is left alone, and tried again."""

import random

from hypothesis import given
from hypothesis import strategies as st

from env_manager.breakers import WINDOW, Breaker

FAILED = st.lists(st.booleans(), max_size=200)


def breaker(**settings: float) -> Breaker:
    chosen = {"most_failures": 4, "share": 0.5, "first_seconds": 5.0, "most_seconds": 15.0, **settings}
    return Breaker(**chosen)  # pyright: ignore[reportArgumentType]


def tell(one: Breaker, *failed: bool) -> list[bool]:
    """One episode a second; whether each opened it."""
    return [one.failed(float(second)) if fails else one.played() or False for second, fails in enumerate(failed)]


def test_it_opens_when_enough_episodes_failed_and_they_are_a_large_enough_share():
    one = breaker(share=0.55)

    opened = tell(one, True, False, False, False, False, True, True, True, True)

    assert opened == [False] * 8 + [True]  # 4 of 8 are half, 5 of 9 are 0.556


def test_fewer_failures_than_that_are_borne_whatever_their_share():
    one = breaker(most_failures=4)

    assert tell(one, True, True, True) == [False] * 3
    assert tell(one, True) == [True]


def test_0_failures_never_open_it():
    one = breaker(most_failures=0)

    assert not any(tell(one, *[True] * 100))


@given(FAILED, st.integers(1, WINDOW), st.floats(0.01, 1), st.integers(0, 2 * WINDOW))
def test_it_opens_exactly_when_the_latest_episodes_say_so(failed: list[bool], most: int, share: float, playing: int):
    one = breaker(most_failures=most, share=share)

    for count, fails in enumerate(failed, 1):
        latest = failed[max(0, count - max(WINDOW, playing)) : count]
        expected = fails and sum(latest) >= most and sum(latest) >= share * max(len(latest), playing)
        assert (one.failed(0.0, playing) if fails else one.played(playing) or False) == expected
        if expected:
            assert one.is_open
            return
    assert not one.is_open


@given(st.integers(0, 10), st.floats(0.5, 10), st.floats(10, 100))
def test_each_probe_that_fails_doubles_the_suspension_up_to_its_bound(probes: int, first: float, most: float):
    one = breaker(most_failures=1, first_seconds=first, most_seconds=most)
    one.failed(100.0)

    for _ in range(probes):
        one.probe_failed(100.0)

    assert one.is_open
    assert one.seconds == min(first * 2**probes, most)
    assert one.reopens_at == 100.0 + one.seconds


def test_a_probe_that_comes_to_its_end_closes_it_and_what_was_before_is_forgotten():
    one = breaker()
    tell(one, True, True, True, True)
    one.probe_failed(5.0)

    one.probe_played()

    assert not one.is_open
    assert tell(one, True, True, True, True) == [False, False, False, True]
    assert one.seconds == 5.0


def test_what_was_begun_before_it_opened_says_nothing_any_more():
    one = breaker()
    tell(one, True, True, True, True)

    one.played()

    assert not one.failed(99.0)
    assert (one.is_open, one.reopens_at) == (True, 8.0)


def test_three_failures_in_ten_leave_an_environment_alone_hardly_ever():
    chance = random.Random(7)
    one = breaker(most_failures=16, share=0.75)

    assert not any(one.failed(0.0) for _ in range(20_000) if chance.random() < 0.3 or one.played())


def test_a_burst_of_which_some_fail_before_any_other_ends_is_no_environment_that_fails():
    one = breaker(most_failures=16, share=0.75)

    opened = [one.failed(0.0, playing=128) for _ in range(96)]

    assert opened == [False] * 95 + [True]  # 96 of 128 are 0.75
