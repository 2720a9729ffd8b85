"""Groups as sample_buffer delivers them, to the batch as advantages see it."""

from collections.abc import Sequence

import torch

from rollfarm.tokens import token_count
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from trainer.algorithms.samples import Samples


def samples_of(groups: Sequence[sample_buffer_pb2.Group]) -> Samples:
    """The batch. Its tokens follow in the order of groups, members, turns and tokens."""
    members = [(index, each) for index, group in enumerate(groups) for each in group.trajectories]
    actions = [
        (index, turn)
        for index, (_, trajectory) in enumerate(members)
        for turn in trajectory.turns
        if turn.author == trajectory_pb2.AUTHOR_POLICY
    ]
    lengths = torch.tensor([token_count(turn.token_ids) for _, turn in actions], dtype=torch.int64)
    states = _numbers([(members[index][0], turn.state_hash) for index, turn in actions])
    return Samples(
        group_N=torch.tensor([group for group, _ in members], dtype=torch.int64),
        reward_N=torch.tensor([trajectory.reward for _, trajectory in members], dtype=torch.float64),
        trajectory_K=torch.tensor([index for index, _ in actions], dtype=torch.int64),
        step_reward_K=torch.tensor([turn.step_reward for _, turn in actions], dtype=torch.float64),
        state_K=torch.tensor(states, dtype=torch.int64),
        action_P=torch.repeat_interleave(torch.arange(len(actions)), lengths),
    )


def _numbers(states: Sequence[tuple[int, str]]) -> list[int]:
    """A number for each state of each group; -1 where the environment gave no hash."""
    known: dict[tuple[int, str], int] = {}
    return [known.setdefault(state, len(known)) if state[1] else -1 for state in states]
