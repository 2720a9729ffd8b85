from rollfarm.up.restarts import RestartPolicy


def test_delays_double_with_every_crash_up_to_a_bound() -> None:
    policy = RestartPolicy(max_restarts=8, window_seconds=100, first_delay=0.5, last_delay=3.0)

    delays = [policy.crashed(now) for now in (0, 1, 2, 3, 4)]

    assert delays == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_one_crash_too_many_within_the_window_gives_up() -> None:
    policy = RestartPolicy(max_restarts=2, window_seconds=100)

    assert policy.crashed(0) is not None
    assert policy.crashed(50) is not None
    assert policy.crashed(99) is None


def test_crashes_before_the_window_are_forgotten() -> None:
    policy = RestartPolicy(max_restarts=1, window_seconds=10, first_delay=0.5)
    policy.crashed(0)

    assert policy.crashed(10) == 0.5


def test_no_restart_is_forgiven_when_none_is_allowed() -> None:
    assert RestartPolicy(max_restarts=0, window_seconds=10).crashed(0) is None
