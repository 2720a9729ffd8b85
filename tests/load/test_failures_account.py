"""The account of load_tests/failures.py finds each failure that was not injected, and each injection without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from load_tests.failing.account import Told, account, read_log
from load_tests.failing.injections import Injection

CHECKOUT = Path(__file__).parents[2]
ENV, REWARD = "OUTCOME_ENV_FAILED", "OUTCOME_REWARD_FAILED"

INJECTED = [Injection("hangs", "a", 1.0), Injection("raises in reset", "b", 1.0), Injection("cell killed", "c", 1.0)]
TOLD = Told(failed={"a": ENV, "b": ENV, "c": REWARD}, causes=dict.fromkeys("abc", "it was made to"))
COUNTED = {"OUTCOME_OK": 7, ENV: 2, REWARD: 1}


def test_a_run_in_which_every_injected_episode_failed_and_was_counted_has_no_faults():
    told = account(INJECTED, TOLD, COUNTED)

    assert told.faults == []
    assert dict(told.injected_by_outcome) == {ENV: 2, REWARD: 1}
    assert told.failed_share == pytest.approx(0.3)


def test_injected_episodes_that_were_cancelled_first_are_named_apart():
    told = account(
        INJECTED, Told(failed={"b": ENV, "c": REWARD}, causes=TOLD.causes, cancelled={"a", "z"}), {ENV: 1, REWARD: 1}
    )

    assert told.faults == []
    assert (told.cancelled[ENV], told.cancelled[REWARD]) == (1, 0)


def test_failures_that_came_too_late_for_sample_buffer_need_not_be_counted_by_it():
    told = account(INJECTED, Told(TOLD.failed, TOLD.causes, late={"b", "z"}), {ENV: 1, REWARD: 1})

    assert told.faults == []
    assert told.late[ENV] == 1


def test_an_injection_of_which_nothing_came_is_a_fault():
    told = account(INJECTED, Told({"a": ENV, "b": ENV}, TOLD.causes), {ENV: 2})

    assert told.faults == [f"c: {REWARD} was injected, and it neither failed nor was cancelled"]


def test_a_failure_that_nobody_injected_is_a_fault_with_its_cause():
    told = account(INJECTED[:2], TOLD, COUNTED)

    assert told.faults == [f"c: {REWARD}, and nothing was injected: it was made to"]
    assert dict(told.not_injected) == {REWARD: 1}


def test_a_failure_under_another_outcome_is_a_fault():
    told = account(INJECTED, Told({**TOLD.failed, "c": ENV}, TOLD.causes), {ENV: 3})

    assert told.faults == [f"c: {REWARD} was injected, and it ended as {ENV}: it was made to"]


def test_a_count_of_sample_buffer_that_is_off_by_one_is_a_fault():
    told = account(INJECTED, TOLD, {**COUNTED, ENV: 1})

    assert told.faults == [f"sample_buffer counted 1 of {ENV}, and env_manager told it of 2"]


def test_the_log_tells_of_failures_late_ones_cancellations_and_suspensions():
    lines = [
        "--- the command line",
        json.dumps({"event": "episode failed", "trace_id": "a", "outcome": ENV, "cause": "why"}),
        json.dumps({"event": "lease expired", "trace_id": "a"}),
        json.dumps({"event": "episode cancelled", "trace_id": "b", "outcome": "OUTCOME_CANCELLED"}),
        json.dumps({"event": "environment suspended"}),
        json.dumps({"event": "serving"}),
    ]

    assert read_log(lines) == Told({"a": ENV}, {"a": "why"}, late={"a"}, cancelled={"b"}, suspensions=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_accounts_for_every_injection(tmp_path: Path):
    argv = [sys.executable, "load_tests/failures.py", "--quick", "--folder", str(tmp_path)]

    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["unaccounted"] == figures["suspensions"] == 0
    assert 0.2 < figures["failed_share"] < 0.4
    assert figures["failed_share_without"] == 0
    assert all(figures["injected_by_kind"].values())
    for outcome, injected in figures["injected"].items():
        reached = figures["counted"][outcome] + figures["cancelled"][outcome] + figures["late"][outcome]
        assert injected == reached > 0
