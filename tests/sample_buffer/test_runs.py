"""Several runs in one journal."""

import pytest

from rollfarm.errors import TrainerReplaced
from rollfarm.v1.trajectory_pb2 import OUTCOME_ENV_FAILED
from sample_buffer import events
from sample_buffer.groups import Groups
from sample_buffer.runs import Runs
from sample_buffer.state import IDLE
from tests.sample_buffer.support import fill, lease, make_runs, make_spec, publish, request_id


def configure(runs: Runs, name: str) -> Groups:
    return runs.configure(request_id(), "trainer", make_spec(name=name), f"{name}-nonce", 0.0)[1]


def step(groups: Groups, number: int, *, committed: bool = True) -> None:
    """Play, take, publish and perhaps commit the batch of a step."""
    fill(groups)
    groups.take(number, 0.0)
    publish(groups, trained=number + 1)
    if committed:
        groups.commit(request_id(), number, groups.fold.batch_id(number), 0.0)


def test_the_trainer_that_configured_a_run_last_has_taken_it_over() -> None:
    runs = make_runs(make_spec())

    first = runs.of_trainer("run", "trainer")
    created, _ = runs.configure("again", "restarted", make_spec(), "other", 1.0)

    assert not created
    assert runs.of_trainer("run", "restarted") is first
    with pytest.raises(TrainerReplaced, match="'restarted' has taken over run 'run' from 'trainer'"):
        runs.of_trainer("run", "trainer")


def test_a_repeated_call_of_a_trainer_that_was_replaced_takes_nothing_back() -> None:
    runs = make_runs(make_spec())
    runs.configure("again", "restarted", make_spec(), "other", 1.0)
    before = runs.dump()

    assert runs.configure("configure", "trainer", make_spec(), "nonce", 2.0)[0]
    assert runs.configure("once more", "restarted", make_spec(), "nonce", 3.0)[0] is False

    assert runs.dump() == before


def test_each_run_has_a_trainer_of_its_own() -> None:
    runs = make_runs(make_spec(name="first"))
    runs.configure(request_id(), "another", make_spec(name="second"), "other", 0.0)

    runs.of_trainer("first", "trainer")

    with pytest.raises(TrainerReplaced):
        runs.of_trainer("second", "trainer")


def test_a_journal_from_before_runs_had_trainers_is_read() -> None:
    old = events.encode([events.RunConfigured(0.0, "run", "configure", "nonce", "CgNydW4=")])
    old = old.replace(b',""]', b"]")

    runs = Runs()
    for event in events.decode(old):
        runs.apply(event)

    assert b'""' not in old
    assert runs.run("run").state.trainer_id == ""


def test_a_run_forgets_what_it_retained_when_another_begins_and_goes_on_where_it_was() -> None:
    runs = make_runs(make_spec(name="first"))
    first = runs.run("first")
    for number in range(3):
        step(first, number, committed=number < 2)
    retained = {member.lease_id for index in first.state.retired for member in first.state.groups[index].done()}
    batch = first.take(2, 0.0)

    configure(runs, "second")

    assert len(retained) == 8
    assert set(runs.garbage()) == retained
    assert not set(runs.payload_ids()) & retained
    assert first.state.committed_trajectories == 8
    again = configure(runs, "first")
    assert again.take(2, 0.0) == batch
    step(again, 3)
    assert again.state.committed_trajectories == 16


def test_what_a_run_remembers_does_not_grow_while_another_is_the_current_one() -> None:
    runs = make_runs(make_spec(name="first", alpha=200.0))
    first = runs.run("first")
    held = [one for _ in range(400) for one in lease(first, 1)]
    configure(runs, "second")

    for one in held:
        first.fail(request_id(), one.lease_id, OUTCOME_ENV_FAILED, "its worker gave up", 0.0)

    assert len(first.state.answers) == len(first.state.ended) == IDLE.remembered_requests


def test_what_idle_runs_retain_in_an_older_snapshot_is_forgotten_when_it_is_read() -> None:
    runs = make_runs(make_spec(name="second"))
    step(configure(runs, "first"), 0)
    older = runs.dump().replace(b'"current":"first"', b'"current":"second"')

    again = Runs()
    again.load(older)

    assert runs.run("first").state.retired_trajectories == 4
    assert again.run("first").state.retired_trajectories == 0
    assert len(again.garbage()) == 4
