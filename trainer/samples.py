"""Groups as sample_buffer delivers them, to the batch as advantages see it."""

from collections.abc import Sequence

import numpy as np
import torch

from rollfarm import images
from rollfarm.config import ConfigError
from rollfarm.images import ImageTokens
from rollfarm.tokens import token_count, unpack_ids, unpack_logprobs
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


def refused(groups: Sequence[sample_buffer_pb2.Group]) -> dict[str, str]:
    """The groups that nothing can be learnt from, each with the cause. One trajectory spoils its group, whose rewards
    are compared."""
    found: dict[str, str] = {}
    for group in groups:
        if not group.trajectories:
            found[group.group_id] = "it has no trajectories"
        for trajectory in group.trajectories:
            if not np.isfinite(unpack_logprobs(b"".join(turn.logprobs for turn in trajectory.turns))).all():
                found[group.group_id] = f"a log-probability of trajectory {trajectory.trajectory_id} is not finite"
    return found


def check_vocabulary(groups: Sequence[sample_buffer_pb2.Group], vocabulary: int) -> None:
    """Raise ConfigError for a token that the trainer's model does not know."""
    for group in groups:
        for trajectory in group.trajectories:
            ids_T = unpack_ids(b"".join(turn.token_ids for turn in trajectory.turns))
            unknown = ids_T[(ids_T < 0) | (ids_T >= vocabulary)]
            if len(unknown):
                raise ConfigError(
                    f"model.path: trajectory {trajectory.trajectory_id} of group {group.group_id} has token "
                    f"{unknown[0]}. The vocabulary of its engine has at least {ids_T.max() + 1} tokens, the "
                    f"trainer's {vocabulary}. Give engines, env_managers and trainer the same model; the batch is kept."
                )


def check_images(groups: Sequence[sample_buffer_pb2.Group], path: str) -> None:
    """Raise ConfigError for an image of which the trainer's model, at `path`, would not make the tokens that stand for
    it."""
    for group in groups:
        for trajectory in group.trajectories:
            known: dict[bytes, bytes] = {}
            for turn in trajectory.turns:
                if turn.images and (problem := _image_problem(turn, known, images.load(path))):
                    raise ConfigError(
                        f"model.path: in trajectory {trajectory.trajectory_id} of group {group.group_id} {problem}. "
                        "Give engines, env_managers and trainer the same model; the batch is kept."
                    )


def _image_problem(turn: trajectory_pb2.Turn, known: dict[bytes, bytes], eyes: ImageTokens | None) -> str:
    """Empty where all is well."""
    if eyes is None:
        return "the policy saw an image, and the trainer's model takes none"
    try:
        for image in images.place(turn.images, token_count(turn.token_ids), known):
            made = eyes.count(image.data, image.media_type)
            if made != image.count:
                return f"an image stands for {image.count} tokens, and the trainer's model makes {made} of it"
    except images.BadImage as problem:
        return str(problem)
    return ""


def was_truncated(trajectory: trajectory_pb2.Trajectory) -> bool:
    """Whether a limit ended it: of the episode, or of its last generation."""
    if trajectory.outcome == trajectory_pb2.OUTCOME_TRUNCATED:
        return True
    reasons = [turn.finish_reason for turn in trajectory.turns if turn.author == trajectory_pb2.AUTHOR_POLICY]
    return bool(reasons) and reasons[-1] == trajectory_pb2.FINISH_REASON_LENGTH


def _numbers(states: Sequence[tuple[int, str]]) -> list[int]:
    """A number for each state of each group; -1 where the environment gave no hash."""
    known: dict[tuple[int, str], int] = {}
    return [known.setdefault(state, len(known)) if state[1] else -1 for state in states]
