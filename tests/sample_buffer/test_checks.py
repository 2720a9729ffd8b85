"""Every bad input that the ledger refuses, one test each: a typed error with a remedy, and nothing has changed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256

import pytest

from rollfarm.errors import FarmError, InvalidArgument, InvalidTrajectory, LeaseExpired, RunMismatch, UnknownRun
from rollfarm.run import FilterConfig
from rollfarm.tokens import pack_ids, pack_logprobs
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import views
from sample_buffer.runs import Runs
from tests.sample_buffer.support import complete, lease, make_groups, make_runs, make_spec, play, request_id


@contextmanager
def refused(runs: Runs, error: type[FarmError], message: str) -> Iterator[pytest.ExceptionInfo[FarmError]]:
    """The block ends in this error, which names its remedy, and the runs are as before."""
    before, decided = runs.dump(), len(runs.outbox)
    with pytest.raises(error, match=message) as caught:
        yield caught
    assert error.remedy
    assert error.remedy in str(caught.value)
    assert (runs.dump(), len(runs.outbox)) == (before, decided)


def show(
    turn: tp.Turn, *, data: bytes = b"seen", media_type: str = "image/png", offset: int = 0, count: int = 1
) -> None:
    name = sha256(b"seen").digest()
    turn.images.add(data=data, media_type=media_type, token_offset=offset, token_count=count, sha256=name)


BREAK_TRAJECTORY: dict[str, tuple[Callable[[tp.Trajectory], object], str]] = {
    "a NaN reward": (lambda t: setattr(t, "reward", math.nan), "reward is nan"),
    "an infinite reward": (lambda t: setattr(t, "reward", math.inf), "reward is inf"),
    "a reward of minus infinity": (lambda t: setattr(t, "reward", -math.inf), "reward is -inf"),
    "no reward": (lambda t: t.ClearField("reward"), "reward is unset"),
    "no id": (lambda t: t.ClearField("trajectory_id"), "trajectory_id is empty"),
    "another run": (lambda t: setattr(t, "run_id", "other"), "run_id"),
    "another group": (lambda t: setattr(t, "group_id", "run-g9"), "group_id"),
    "another member": (lambda t: setattr(t, "member", 1), "member"),
    "a failed outcome": (lambda t: setattr(t, "outcome", tp.OUTCOME_ABORTED), "OUTCOME_OK"),
    "too few log-probs": (lambda t: setattr(t.turns[1], "logprobs", pack_logprobs([0.0])), "3 tokens and 1 log-probs"),
    "too many log-probs": (lambda t: setattr(t.turns[1], "logprobs", pack_logprobs([0.0] * 4)), "and 4 log-probs"),
    "no log-probs": (lambda t: t.turns[1].ClearField("logprobs"), "3 tokens and 0 log-probs"),
    "no turns": (lambda t: t.ClearField("turns"), "no turns"),
    "no prompt": (lambda t: t.turns.pop(0), "Turn 0 is the policy's and begins a segment"),
    "a segment without a prompt": (lambda t: setattr(t.turns[1], "begins_segment", True), "Turn 1 is the policy's and"),
    "half a token": (lambda t: setattr(t.turns[1], "token_ids", b"abc"), "whole int32s"),
    "a NaN log-prob": (lambda t: setattr(t.turns[1], "logprobs", pack_logprobs([0, math.nan, 0])), "not finite"),
    "an infinite log-prob": (lambda t: setattr(t.turns[1], "logprobs", pack_logprobs([0, -math.inf, 0])), "not finite"),
    "too short spans": (lambda t: setattr(t.turns[1].version_spans[0], "token_count", 2), "do not sum"),
    "an empty span": (lambda t: t.turns[1].version_spans.add(policy_version=0), "is empty"),
    "log-probs of the environment": (
        lambda t: setattr(t.turns[0], "logprobs", pack_logprobs([0, 0])),
        "not the policy",
    ),
    "a future version": (lambda t: setattr(t.turns[1].version_spans[0], "policy_version", 1), "newest version is 0"),
    "a negative version": (lambda t: setattr(t.turns[1].version_spans[0], "policy_version", -1), "newest version is 0"),
    "an image of the policy's": (lambda t: show(t.turns[1]), "Turn 1 is the policy's and has images"),
    "an image that is not there": (lambda t: show(t.turns[0], data=b""), "the bytes of an image are not there"),
    "an image under another's digest": (lambda t: show(t.turns[0], data=b"other"), "is not that of its bytes"),
    "an image beyond its turn": (lambda t: show(t.turns[0], offset=1, count=2), "2 tokens from 1 of 2"),
    "an image of no token": (lambda t: show(t.turns[0], count=0), "0 tokens from 0 of 2"),
    "images on one another": (lambda t: (show(t.turns[0]), show(t.turns[0])), "or for those of another image"),
    "an image of an unknown kind": (lambda t: show(t.turns[0], media_type="image/gif"), "'image/gif', not one of"),
    "a wrong oldest version": (lambda t: setattr(t, "oldest_policy_version", 3), "oldest_policy_version"),
}


@pytest.mark.parametrize("name", BREAK_TRAJECTORY)
def test_a_trajectory_is_refused_and_its_lease_stays(name: str) -> None:
    spoil, message = BREAK_TRAJECTORY[name]
    runs = make_runs(make_spec())
    groups = runs.run("")
    (held,) = lease(groups, 1)
    trajectory = play(views.episode_lease(groups, held).episode)
    spoil(trajectory)

    with refused(runs, InvalidTrajectory, message):
        groups.complete(request_id(), held.lease_id, trajectory, 0.0)

    assert held.lease_id in groups.state.leases
    assert complete(groups, held) == pb.DISPOSITION_ACCEPTED


def test_an_episode_without_a_policy_token_is_taken_as_of_its_lease() -> None:
    groups = make_groups(make_spec())
    (held,) = lease(groups, 1)
    trajectory = play(views.episode_lease(groups, held).episode)
    del trajectory.turns[1:]

    assert groups.complete(request_id(), held.lease_id, trajectory, 0.0)[0] == pb.DISPOSITION_ACCEPTED


def test_a_trajectory_of_two_segments_is_taken_whole() -> None:
    groups = make_groups(make_spec())
    (held,) = lease(groups, 1)
    trajectory = play(views.episode_lease(groups, held).episode, tokens=3)
    trajectory.turns.extend(list(trajectory.turns))
    trajectory.turns[2].begins_segment = True

    assert groups.complete(request_id(), held.lease_id, trajectory, 0.0)[0] == pb.DISPOSITION_ACCEPTED
    assert groups.state.policy_tokens == 6


def test_an_image_that_a_trajectory_shows_twice_is_in_it_once_and_is_taken() -> None:
    groups = make_groups(make_spec())
    (held,) = lease(groups, 1)
    trajectory = play(views.episode_lease(groups, held).episode)
    show(trajectory.turns[0], offset=1)
    trajectory.turns.add(author=tp.AUTHOR_ENVIRONMENT, token_ids=pack_ids([1, 2]))
    show(trajectory.turns[-1], data=b"")

    assert groups.complete(request_id(), held.lease_id, trajectory, 0.0)[0] == pb.DISPOSITION_ACCEPTED


def test_a_trajectory_id_is_used_once() -> None:
    runs = make_runs(make_spec())
    groups = runs.run("")
    first, second = lease(groups, 2)
    trajectory = play(views.episode_lease(groups, second).episode)
    trajectory.trajectory_id = "run-g0.0.1"
    complete(groups, first)

    with refused(runs, InvalidTrajectory, "'run-g0.0.1' was handed in before"):
        groups.complete(request_id(), second.lease_id, trajectory, 0.0)


def test_turns_of_several_policy_turns_and_versions_are_whole() -> None:
    groups = make_groups(make_spec())
    (held,) = lease(groups, 1)
    trajectory = play(views.episode_lease(groups, held).episode, versions=[0, 0], tokens=5)
    trajectory.turns[2].token_ids = pack_ids([9])

    with pytest.raises(InvalidTrajectory, match="Turn 2 has 1 tokens and 5 log-probs"):
        groups.complete(request_id(), held.lease_id, trajectory, 0.0)


BREAK_SPEC: dict[str, tuple[Callable[[pb.RunSpec], object], str]] = {
    "no run id": (lambda s: s.ClearField("run_id"), "run_id is empty"),
    "no groups": (lambda s: setattr(s, "batch_groups", 0), "batch_groups is 0"),
    "no members": (lambda s: setattr(s, "group_size", 0), "group_size is 0"),
    "negative redundancy": (lambda s: setattr(s, "redundant_members", -1), "redundant_members is -1"),
    "negative redundant groups": (lambda s: setattr(s, "redundant_groups", -1), "redundant_groups is -1"),
    "negative steps": (lambda s: setattr(s, "step_count", -1), "step_count is -1"),
    "no attempt": (lambda s: setattr(s, "max_attempts", 0), "max_attempts is 0"),
    "negative alpha": (lambda s: setattr(s, "alpha", -0.1), "alpha is -0.1"),
    "a NaN alpha": (lambda s: setattr(s, "alpha", math.nan), "alpha is nan"),
    "an infinite alpha": (lambda s: setattr(s, "alpha", math.inf), "alpha is inf"),
    "no lease": (lambda s: s.ClearField("lease_duration"), "lease_duration"),
    "no sampling": (lambda s: s.ClearField("sampling"), "sampling.max_tokens"),
    "no validation sampling": (lambda s: s.ClearField("validation_sampling"), "validation_sampling.max_tokens"),
    "no domain": (lambda s: s.ClearField("domains"), "no domain"),
    "a nameless domain": (lambda s: s.domains[0].ClearField("name"), "domains.name is empty"),
    "no environment": (lambda s: s.domains[0].ClearField("environment"), "domains.environment is empty"),
    "twin domains": (lambda s: s.domains.append(s.domains[0]), "Two domains are named 'maths'"),
    "a weightless domain": (lambda s: setattr(s.domains[0], "weight", 0.0), "weight 0.0"),
    "settings that are no JSON": (lambda s: setattr(s.domains[0], "settings_json", "{"), "not a JSON object"),
    "settings that are a list": (lambda s: setattr(s.domains[0], "settings_json", "[]"), "not a JSON object"),
    "an unknown filter": (lambda s: s.filters.add(name="zero_varianse"), "Did you mean 'zero_variance'"),
    "an unknown setting": (
        lambda s: s.filters.add(name="difficulty", settings={"min": 0.1}),
        "Known: max_mean, min_mean",
    ),
    "a NaN setting": (lambda s: s.filters.add(name="difficulty", settings={"min_mean": math.nan}), "not a number"),
}


@pytest.mark.parametrize("name", BREAK_SPEC)
def test_a_spec_is_refused(name: str) -> None:
    spoil, message = BREAK_SPEC[name]
    runs = make_runs(make_spec())
    spec = make_spec()
    spoil(spec)

    with refused(runs, InvalidArgument, message):
        runs.configure(request_id(), "trainer", spec, "other", 0.0)


def test_a_run_that_nobody_configured_is_unknown() -> None:
    runs = make_runs(make_spec())

    with refused(runs, UnknownRun, "There is no run 'rum'"):
        runs.of_trainer("rum", "trainer")


def test_a_lease_that_expired_brings_nothing_in() -> None:
    runs = make_runs(make_spec(lease_seconds=10))
    groups = runs.run("")
    (held,) = lease(groups, 1)
    groups.tick(10.0)

    with refused(runs, LeaseExpired, "Lease nonce-0 is not out"):
        complete(groups, held, now=11.0)
    with refused(runs, LeaseExpired, "Lease nonce-0 is not out"):
        groups.fail(request_id(), held.lease_id, tp.OUTCOME_ENV_FAILED, "too late", 11.0)


def test_a_lease_that_never_was_brings_nothing_in() -> None:
    runs = make_runs(make_spec())

    with refused(runs, LeaseExpired, "'elsewhere-0' is not out"):
        runs.of_lease("elsewhere-0")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("group_size", 3),
        ("batch_groups", 3),
        ("alpha", 2.0),
        ("redundant_members", 1),
        ("redundant_groups", 1),
        ("max_attempts", 1),
        ("seed", 8),
    ],
)
def test_a_run_that_exists_is_not_found_with_another_setting(setting: str, value: float) -> None:
    runs = make_runs(make_spec())
    lease(runs.run(""), 1)
    spec = make_spec()
    setattr(spec, setting, value)

    with refused(runs, RunMismatch, f"'run' exists with another {setting}") as caught:
        runs.configure(request_id(), "trainer", spec, "other", 0.0)

    assert caught.value.facts == {"run_id": "run", "fields": setting}


def test_a_run_that_exists_is_found_and_only_its_step_count_may_change() -> None:
    runs = make_runs(make_spec(steps=5))

    found, groups = runs.configure(request_id(), "trainer", make_spec(steps=9), "other", 0.0)

    assert (found, groups.spec.step_count, groups.state.nonce) == (False, 9, "nonce")
    with refused(runs, RunMismatch, "another alpha, filters"):
        runs.configure(
            request_id(), "trainer", make_spec(alpha=2.0, filters=[FilterConfig(name="difficulty")]), "other", 0.0
        )


def test_a_second_run_becomes_the_current_one_and_the_first_is_still_there() -> None:
    runs = make_runs(make_spec())
    (old,) = lease(runs.run(""), 1)
    runs.configure(request_id(), "trainer", make_spec(name="second"), "later", 0.0)

    (new,) = lease(runs.run(""), 1)

    assert (runs.current, new.lease_id, old.lease_id) == ("second", "later-0", "nonce-0")
    assert runs.of_lease(old.lease_id).spec.run_id == "run"
    assert runs.heartbeat("worker", [old.lease_id, new.lease_id], 0.0) == []
