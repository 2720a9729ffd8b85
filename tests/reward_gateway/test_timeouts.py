import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_gateway.timeouts import Late, Timeout, timed


def rollpackers(window: int = 3) -> Timeout:
    return Timeout(least=2.0, factor=1.5, most=30.0, window=window)


def after(timeout: Timeout, *successes: float) -> float:
    for seconds in successes:
        timeout.succeeded(seconds)
    return timeout.seconds()


def test_a_reward_that_has_never_succeeded_is_given_the_longest_time():
    assert rollpackers().seconds() == 30.0


@pytest.mark.parametrize(
    ("successes", "seconds"),
    [((0.1,), 2.0), ((4.0,), 6.0), ((4.0, 1.0), 6.0), ((1.0, 2.0), 3.0), ((25.0,), 30.0)],
)
def test_later_it_is_given_half_as_much_again_as_its_longest_success_within_bounds(successes, seconds):
    assert after(rollpackers(), *successes) == seconds


def test_only_the_latest_successes_count():
    assert after(rollpackers(window=3), 10.0, 1.0, 2.0) == 15.0
    assert after(rollpackers(window=3), 10.0, 1.0, 2.0, 3.0) == 4.5


def test_each_in_a_row_that_is_late_doubles_the_time_and_a_success_ends_that():
    timeout = rollpackers()
    timeout.succeeded(0.1)

    given_times = []
    for _ in range(5):
        timeout.late()
        given_times.append(timeout.seconds())
    timeout.succeeded(5.0)

    assert given_times == [4.0, 8.0, 16.0, 30.0, 30.0]
    assert timeout.seconds() == 7.5


def test_what_is_timed_tells_the_timeout_how_it_ended():
    timeout = rollpackers()
    timeout.succeeded(0.0)

    with pytest.raises(Late), timed(timeout) as first:
        raise Late("late")
    with pytest.raises(ValueError, match="wrong"), timed(timeout) as second:
        raise ValueError("wrong")
    with timed(timeout) as third:
        pass

    assert (first, second, third, timeout.seconds()) == (2.0, 4.0, 4.0, 2.0)


ENDS = st.lists(st.one_of(st.just("late"), st.floats(0, 1e6)), max_size=200)


@given(ends=ENDS, least=st.floats(0, 60), most=st.floats(0.1, 60), factor=st.floats(1, 10))
def test_the_time_is_always_within_its_bounds(ends, least, most, factor):
    timeout = Timeout(least=least, factor=factor, most=most, window=4)

    for end in ends:
        timeout.late() if end == "late" else timeout.succeeded(end)

        assert min(least, most) <= timeout.seconds() <= most
