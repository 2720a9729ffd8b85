"""The trainer's side of sample_buffer."""

from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2
from trainer.buffer import join


def test_a_group_that_goes_on_in_the_next_message_is_one_group():
    groups: list[pb.Group] = []

    for message in ([part("a", "1", "2"), part("b", "3")], [part("b", "4")], [part("b", "5"), part("c", "6")]):
        join(groups, message)

    assert groups == [part("a", "1", "2"), part("b", "3", "4", "5"), part("c", "6")]


def part(group_id: str, *ids: str) -> pb.Group:
    trajectories = [trajectory_pb2.Trajectory(trajectory_id=name) for name in ids]
    return pb.Group(group_id=group_id, trajectories=trajectories)
