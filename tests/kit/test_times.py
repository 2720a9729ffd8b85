import pytest

from rollfarm import times


@pytest.mark.parametrize(
    ("seconds", "whole", "nanos"),
    [(0.0, 0, 0), (2.5, 2, 500_000_000), (0.1 + 0.2, 0, 300_000_000), (0.9999999999, 1, 0), (-1.5, 0, 0)],
)
def test_a_duration_is_rounded_to_the_nanosecond_and_never_negative(seconds: float, whole: int, nanos: int):
    duration = times.duration(seconds)

    assert (duration.seconds, duration.nanos) == (whole, nanos)


def test_a_moment_keeps_its_fraction():
    moment = times.timestamp(1_700_000_000.25)

    assert (moment.seconds, moment.nanos) == (1_700_000_000, 250_000_000)
