import numpy as np
import pytest

from rollfarm.errors import InvalidTrajectory
from rollfarm.v1 import trajectory_pb2
from tests.trainer.conftest import random_rows, trajectory, turn
from trainer.rows import COLUMNS, decode, encode, rows_of


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


def test_a_turn_whose_arrays_do_not_fit_together_is_refused() -> None:
    broken = trajectory(1.0, name="broken")
    broken.turns[1].logprobs += broken.turns[1].logprobs

    with pytest.raises(InvalidTrajectory, match="trajectory broken has 1 tokens, 2 log-probabilities and 1 versions"):
        rows_of(broken)


def test_a_trajectory_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidTrajectory, match="does not begin with a prompt"):
        rows_of(trajectory_pb2.Trajectory(turns=[turn(trajectory_pb2.AUTHOR_POLICY, [7])]))


def test_rows_survive_the_way_to_another_rank() -> None:
    rows = random_rows(7)

    back = decode(encode(rows))

    assert len(back) == 7
    for before, after in zip(rows, back, strict=True):
        assert np.array_equal(before.ids_T, after.ids_T)
        assert np.array_equal(before.mask_T, after.mask_T)
        assert all(np.array_equal(getattr(before, name), getattr(after, name)) for name in COLUMNS)
        assert before.oldest_version == after.oldest_version
