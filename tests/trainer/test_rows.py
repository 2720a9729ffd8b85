import numpy as np
import pytest
import torch

from rollfarm.errors import InvalidTrajectory
from rollfarm.v1 import trajectory_pb2
from tests.trainer.conftest import random_rows, trajectory, turn
from trainer.rows import decode, encode, micro_batches, policy_token_count, rows_of, share_of


def test_a_row_is_the_turns_end_to_end_with_a_mask_on_the_policys() -> None:
    (row,) = rows_of(trajectory(1.0, action=7, version=3))

    assert row.ids_T.tolist() == [8, 9, 7, 10, 7, 2]
    assert row.mask_T.tolist() == [False, False, True, False, True, True]
    assert row.behavior_logp_P.tolist() == pytest.approx([-2.9] * 3)
    assert row.oldest_version == 3


def test_each_segment_is_a_row_that_sees_its_own_tokens_alone() -> None:
    whole = trajectory(1.0, action=7, version=3)
    second = trajectory(1.0, action=5, version=2)
    second.turns[0].begins_segment = True
    whole.turns.extend(second.turns)
    unanswered = whole.turns.add(author=trajectory_pb2.AUTHOR_ENVIRONMENT, begins_segment=True)
    unanswered.token_ids = second.turns[0].token_ids

    rows = rows_of(whole)

    assert [row.ids_T.tolist() for row in rows] == [[8, 9, 7, 10, 7, 2], [8, 9, 5, 10, 5, 2]]
    assert [row.mask_T.tolist() for row in rows] == [[False, False, True, False, True, True]] * 2
    assert [row.oldest_version for row in rows] == [3, 2]


def test_a_trajectory_in_which_the_policy_wrote_nothing_is_a_row_with_nothing_to_learn() -> None:
    prompt = turn(trajectory_pb2.AUTHOR_ENVIRONMENT, [7])

    (row,) = rows_of(trajectory_pb2.Trajectory(turns=[prompt], oldest_policy_version=4))

    assert (row.mask_T.any(), row.oldest_version) == (False, 4)


def test_a_segment_that_begins_with_the_policys_turn_is_refused() -> None:
    broken = trajectory(1.0)
    broken.turns[1].begins_segment = True

    with pytest.raises(InvalidTrajectory, match="a segment of it, does not begin with a prompt"):
        rows_of(broken)


def test_a_micro_batch_knows_the_row_and_the_action_of_each_token() -> None:
    rows = [*rows_of(trajectory(1.0)), *rows_of(trajectory(0.0))]

    (batch,) = micro_batches(rows, 64, torch.device("cpu"))

    assert batch.row_P.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.action_P.tolist() == [0, 1, 1, 2, 3, 3]


def test_a_turn_whose_arrays_do_not_fit_together_is_refused() -> None:
    broken = trajectory(1.0, name="broken")
    broken.turns[1].logprobs += broken.turns[1].logprobs

    with pytest.raises(InvalidTrajectory, match="trajectory broken has 1 tokens, 2 log-probabilities and 1 versions"):
        rows_of(broken)


def test_a_trajectory_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidTrajectory, match="does not begin with a prompt"):
        rows_of(trajectory_pb2.Trajectory(turns=[turn(trajectory_pb2.AUTHOR_POLICY, [7])]))


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    rows = random_rows(20)

    batches = list(micro_batches(rows, 64, torch.device("cpu")))

    assert all(batch.ids_RT.numel() <= 64 for batch in batches)
    assert sum(len(batch.ids_RT) for batch in batches) == 20
    assert sum(int(batch.mask_RT.sum()) for batch in batches) == policy_token_count(rows)
    assert sum(len(batch.advantage_P) for batch in batches) == policy_token_count(rows)


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
        assert np.array_equal(before.behavior_logp_P, after.behavior_logp_P)
        assert np.array_equal(before.advantage_P, after.advantage_P)
        assert before.oldest_version == after.oldest_version
