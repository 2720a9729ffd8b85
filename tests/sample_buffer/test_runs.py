"""Several runs in one journal."""

from sample_buffer.groups import Groups
from sample_buffer.runs import Runs
from sample_buffer.state import IDLE
from tests.sample_buffer.support import fill, lease, make_runs, make_spec, publish, request_id


def configure(runs: Runs, name: str) -> Groups:
    return runs.configure(request_id(), make_spec(name=name), f"{name}-nonce", 0.0)[1]


def step(groups: Groups, number: int, *, committed: bool = True) -> None:
    """Play, take, publish and perhaps commit the batch of a step."""
    fill(groups)
    groups.take(number, 0.0)
    publish(groups, trained=number + 1)
    if committed:
        groups.commit(request_id(), number, groups.fold.batch_id(number), 0.0)


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
        first.fail(request_id(), one.lease_id, 3, "its worker gave up", 0.0)

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
