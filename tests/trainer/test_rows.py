import numpy as np
import pytest
import torch

from rollfarm.errors import InvalidTrajectory
from rollfarm.v1 import trajectory_pb2
from tests.trainer.conftest import random_rows, trajectory, turn
from trainer.rows import decode, encode, micro_batches, policy_token_count, row_of, share_of


def test_a_row_is_the_turns_end_to_end_with_a_mask_on_the_policys() -> None:
    row = row_of(trajectory(1.0, action=7, version=3))

    assert row.ids_T.tolist() == [8, 9, 7, 10, 7, 2]
    assert row.mask_T.tolist() == [False, False, True, False, True, True]
    assert row.behavior_logp_T.tolist() == pytest.approx([0, 0, -2.9, 0, -2.9, -2.9])
    assert row.oldest_version == 3


def test_a_turn_whose_arrays_do_not_fit_together_is_refused() -> None:
    broken = trajectory(1.0, name="broken")
    broken.turns[1].logprobs += broken.turns[1].logprobs

    with pytest.raises(InvalidTrajectory, match="trajectory broken has 1 tokens, 2 log-probabilities and 1 versions"):
        row_of(broken)


def test_a_trajectory_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidTrajectory, match="does not begin with a prompt"):
        row_of(trajectory_pb2.Trajectory(turns=[turn(trajectory_pb2.AUTHOR_POLICY, [7])]))


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    rows = random_rows(20)

    batches = list(micro_batches(rows, 64, torch.device("cpu")))

    assert all(batch.ids_RT.numel() <= 64 for batch in batches)
    assert sum(len(batch.ids_RT) for batch in batches) == 20
    assert sum(int(batch.mask_RT.sum()) for batch in batches) == policy_token_count(rows)
    assert not any(batch.behavior_logp_RT[~batch.mask_RT].any() for batch in batches)


def test_a_row_over_the_budget_has_a_micro_batch_of_its_own() -> None:
    batches = list(micro_batches(random_rows(3), 1, torch.device("cpu")))

    assert [len(batch.ids_RT) for batch in batches] == [1, 1, 1]


def test_shares_of_the_ranks_are_a_partition_with_nearly_equal_tokens() -> None:
    rows = random_rows(41)

    shares = [share_of(rows, rank, 3) for rank in range(3)]

    assert sorted(id(row) for share in shares for row in share) == sorted(map(id, rows))
    tokens = [sum(map(len, share)) for share in shares]
    assert max(tokens) - min(tokens) <= 24


def test_rows_survive_the_way_to_another_rank() -> None:
    rows = random_rows(7)

    back = decode(encode(rows))

    assert len(back) == 7
    for before, after in zip(rows, back, strict=True):
        assert np.array_equal(before.ids_T, after.ids_T)
        assert np.array_equal(before.mask_T, after.mask_T)
        assert np.array_equal(before.behavior_logp_T, after.behavior_logp_T)
        assert before.advantage == after.advantage
