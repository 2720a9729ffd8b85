"""What people and their tools read."""

import pytest

from rollfarm.errors import InvalidArgument, UnknownTrajectory
from rollfarm.rpc import CHUNK_BYTES
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import views, wire
from sample_buffer.groups import Groups
from sample_buffer.state import Lease
from tests.sample_buffer.support import (
    complete,
    lease,
    make_groups,
    make_runs,
    make_spec,
    play,
    publish,
    request_id,
)


class Store:
    """Payloads of what was completed through it."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.payloads: dict[str, bytes] = {}

    def complete(self, held: Lease, outcome: "tp.Outcome.ValueType" = tp.OUTCOME_OK, tokens: int = 3) -> tp.Trajectory:
        trajectory = play(views.episode_lease(self.groups, held).episode, tokens=tokens)
        trajectory.outcome = outcome
        self.groups.complete(request_id(), held.lease_id, trajectory, 2.0)
        self.payloads[held.lease_id] = trajectory.SerializeToString(deterministic=True)
        return trajectory

    def list(self, **request: object) -> pb.ListTrajectoriesResponse:
        asked = pb.ListTrajectoriesRequest(**request)  # pyright: ignore[reportArgumentType]
        return views.list_trajectories(self.groups, asked, self.payloads.__getitem__)


def ids(page: pb.ListTrajectoriesResponse) -> list[str]:
    return [trajectory.trajectory_id for trajectory in page.trajectories]


def test_trajectories_are_listed_newest_first_page_by_page() -> None:
    store = Store(make_groups(make_spec()))
    done = [store.complete(held).trajectory_id for held in lease(store.groups, 5)]

    first = store.list(page_size=2)
    second = store.list(page_size=2, page_token=first.next_page_token)
    third = store.list(page_size=2, page_token=second.next_page_token)

    assert ids(first) + ids(second) + ids(third) == done[::-1]
    assert third.next_page_token == ""


def test_trajectories_are_listed_by_group_outcome_and_version() -> None:
    store = Store(make_groups(make_spec()))
    held = lease(store.groups, 3)
    store.complete(held[0])
    store.complete(held[1], tp.OUTCOME_TRUNCATED)
    publish(store.groups)
    store.complete(lease(store.groups, 1)[0])

    assert ids(store.list(group_id="run-g0")) == ["run-g0.1.1", "run-g0.0.1"]
    assert ids(store.list(outcome=tp.OUTCOME_TRUNCATED)) == ["run-g0.1.1"]
    assert ids(store.list(policy_version=1)) == ["run-g1.1.1"]


@pytest.mark.parametrize("request_fields", [{"page_token": "x"}, {"page_size": -1}])
def test_a_page_that_cannot_be_is_refused(request_fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Store(make_groups(make_spec())).list(**request_fields)


def test_lineage_tells_the_whole_story_of_a_trajectory() -> None:
    store = Store(make_groups(make_spec(lease_seconds=10)))
    groups = store.groups
    first, second = lease(groups, 2, now=0.0)
    groups.heartbeat("worker", [second.lease_id], 5.0)
    groups.tick(10.0)
    (again,) = lease(groups, 1, now=11.0)
    story = store.complete(again)
    store.complete(second)
    for held in lease(groups, 2):
        store.complete(held)
    groups.take(0, 12.0)
    groups.publish(request_id(), 1, 1, 13.0)
    groups.commit(request_id(), 0, "nonce-step-0", 14.0)

    told = views.lineage(groups, story.trajectory_id, store.payloads.__getitem__)

    assert [one.event for one in told.transitions] == [
        "admitted", "leased", "expired", "leased", "completed", "ready", "taken", "published", "committed",
    ]  # fmt: skip
    assert [one.lease_id for one in told.transitions if one.lease_id] == [first.lease_id] * 2 + [again.lease_id] * 2
    assert {one.batch_id for one in told.transitions[-3:]} == {"nonce-step-0"}
    assert told.transitions[-1].create_time.seconds == 14
    assert told.trajectory == story


def test_lineage_names_the_engines_of_the_finished_episode_in_order_of_their_first_turn() -> None:
    store = Store(make_groups(make_spec()))
    (held,) = lease(store.groups, 1)
    played = play(views.episode_lease(store.groups, held).episode, versions=[0, 0, 0, 0])
    for turn, engine in zip(played.turns[1:], ["e2", "e1", "", "e2"], strict=True):
        turn.engine_id = engine
    store.groups.complete(request_id(), held.lease_id, played, 2.0)
    store.payloads[held.lease_id] = played.SerializeToString()

    told = views.lineage(store.groups, played.trajectory_id, store.payloads.__getitem__)

    assert [(one.event, list(one.engine_ids)) for one in told.transitions] == [
        ("admitted", []),
        ("leased", []),
        ("completed", ["e2", "e1"]),
    ]


def test_a_trajectory_that_was_never_completed_is_unknown() -> None:
    with pytest.raises(UnknownTrajectory):
        make_runs(make_spec()).of_trajectory("nowhere")


def test_status_counts_what_there_is() -> None:
    groups = make_groups(make_spec())
    held = lease(groups, 7, now=1.0)
    for one in held[:5]:
        complete(groups, one)
    groups.take(0, 2.0)

    status = views.status(groups, 3.0)

    assert dict(status.episode_counts) == {"pending": 1, "leased": 2, "done": 5}
    assert dict(status.group_counts) == {"open": 2, "ready": 0, "taken": 2}
    assert (status.credit_count, status.credits_in_use_count, status.next_group_index) == (4, 4, 4)
    assert dict(status.outcome_counts) == {"OUTCOME_OK": 5}
    assert dict(status.staleness_counts) == {0: 4}
    assert (status.policy_token_count, status.last_batch_mean_reward) == (15, 1.0)
    assert status.oldest_lease_age.seconds == 2


def test_a_batch_is_streamed_in_bounded_messages_of_the_stored_bytes() -> None:
    store = Store(make_groups(make_spec(batch_groups=3)))
    done = [store.complete(held, tokens=200) for held in lease(store.groups, 6)]
    taken = store.groups.take(0, 0.0)
    assert taken is not None
    groups = views.raw_groups(store.groups, taken[0], store.payloads.__getitem__)
    head = pb.Batch(batch_id="b", group_count=3)

    whole = list(wire.messages(head, groups))
    parts = list(wire.messages(head, groups, most_bytes=8000))

    assert len(whole) == 1
    assert len(whole[0]) < CHUNK_BYTES
    assert [len(part) <= 8000 for part in parts] == [True, True]
    parsed = [pb.LeaseBatchResponse.FromString(part) for part in parts]
    assert [part.last for part in parsed] == [False, True]
    assert [part.batch.batch_id for part in parsed] == ["b", "b"]
    assert [t for part in parsed for group in part.groups for t in group.trajectories] == done
    assert [group.index for part in parsed for group in part.groups] == [0, 1, 2]
    assert list(pb.LeaseBatchResponse.FromString(whole[0]).groups) == [g for part in parsed for g in part.groups]


def test_a_group_larger_than_a_message_goes_on_in_the_next() -> None:
    stored = [tp.Trajectory(trajectory_id=f"{number}" * 50).SerializeToString() for number in range(5)]
    groups = [wire.RawGroup(pb.Group(group_id="a"), stored[:3]), wire.RawGroup(pb.Group(group_id="b"), stored[3:])]

    whole = pb.LeaseBatchResponse.FromString(*wire.messages(pb.Batch(), groups))
    sizes = {most: [len(part) for part in wire.messages(pb.Batch(), groups, most_bytes=most)] for most in (1, 130, 200)}
    parts = [pb.LeaseBatchResponse.FromString(part) for part in wire.messages(pb.Batch(), groups, most_bytes=130)]

    assert [(group.group_id, len(group.trajectories)) for group in whole.groups] == [("a", 3), ("b", 2)]
    assert [[(group.group_id, len(group.trajectories)) for group in part.groups] for part in parts] == [
        [("a", 2)],
        [("a", 1)],
        [("b", 2)],
    ]
    assert [t for part in parts for group in part.groups for t in group.trajectories] == [
        tp.Trajectory.FromString(each) for each in stored
    ]
    assert len(sizes[1]) == 5
    assert max(sizes[130]) <= 130
    assert max(sizes[200]) <= 200


def test_an_episode_says_how_many_members_complete_its_group() -> None:
    groups = make_groups(make_spec(group_size=2, redundant_members=1))
    groups.start_validation(request_id(), "v", 1, 0.0)

    sizes = [views.episode_lease(groups, held).episode.group_size for held in lease(groups, 2)]

    assert sizes == [1, 2]
