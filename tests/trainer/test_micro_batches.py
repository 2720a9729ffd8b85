import pytest
import torch

from tests.trainer.conftest import random_rows, trajectory
from trainer.micro_batches import micro_batch, plan
from trainer.rows import COLUMNS, rows_of

CPU = torch.device("cpu")


def test_a_micro_batch_knows_the_row_and_the_action_of_each_token() -> None:
    rows = [*rows_of(trajectory(1.0)), *rows_of(trajectory(0.0))]

    batch = micro_batch(rows, [0, 1], CPU)

    assert batch.row_P.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.action_P.tolist() == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plan_holds_every_row_once_within_the_budget(world_size: int) -> None:
    rows = random_rows(20)

    dealt = plan(rows, world_size, 64)

    places = [each for of_rank in dealt for each in of_rank]
    assert sorted(place for each in places for place in each) == list(range(20))
    assert all(len(each) * max(len(rows[place]) for place in each) <= 64 for each in places if each)


def test_a_row_over_the_budget_has_a_micro_batch_of_its_own() -> None:
    (batches,) = plan(random_rows(3), 1, 1)

    assert [len(each) for each in batches] == [1, 1, 1]


def test_ranks_have_as_many_micro_batches_and_nearly_as_many_tokens() -> None:
    rows = random_rows(41)

    dealt = plan(rows, 3, 64)

    assert len({len(batches) for batches in dealt}) == 1
    tokens = [sum(len(rows[place]) for batch in batches for place in batch) for batches in dealt]
    assert max(tokens) - min(tokens) <= 24


def test_an_empty_micro_batch_teaches_nothing() -> None:
    batch = micro_batch(random_rows(2), [], CPU)

    assert (batch.rows, int(batch.mask_RT.sum())) == (1, 0)
    assert all(len(getattr(batch, name)) == 0 for name in COLUMNS)
