import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.conftest import random_rows, trajectory
from trainer.micro_batches import ATTENTION_TOKENS, micro_batch, plan
from trainer.rows import COLUMNS, Row, rows_of

CPU = torch.device("cpu")

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def row(length: int) -> Row:
    """All of it the prompt's."""
    return Row(np.zeros(length, np.int32), np.zeros(length, np.bool_))


def cost(lengths: list[int]) -> float:
    return sum(length + length**2 / ATTENTION_TOKENS for length in lengths)


def test_a_micro_batch_knows_the_row_and_the_action_of_each_token() -> None:
    rows = [*rows_of(trajectory(1.0)), *rows_of(trajectory(0.0))]

    batch = micro_batch(rows, [0, 1], CPU)

    assert batch.row_P.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.action_P.tolist() == [0, 1, 1, 2, 3, 3]


def test_rows_lie_end_to_end_and_each_begins_at_position_0() -> None:
    rows = [
        Row(np.array([5, 6, 7], np.int32), np.array([False, True, True])),
        Row(np.array([8, 9], np.int32), np.array([False, True])),
    ]

    batch = micro_batch(rows, [1, 0], CPU)

    assert batch.ids_T.tolist() == [8, 9, 5, 6, 7]
    assert batch.position_T.tolist() == [0, 1, 0, 1, 2]
    assert batch.lengths_R.tolist() == [2, 3]
    assert batch.at_P.tolist() == [1, 3, 4]
    assert batch.policy_tokens_R.tolist() == [1, 2]
    assert batch.ids_RT.tolist() == [[8, 9, 0], [5, 6, 7]]
    assert batch.padded(batch.mask_T).tolist() == [[False, True, False], [False, True, True]]


def test_a_row_that_begins_in_its_mask_is_refused() -> None:
    bad = Row(np.zeros(2, np.int32), np.array([True, True]))

    with pytest.raises(ValueError, match="nothing predicts it"):
        micro_batch([row(3), bad], [0, 1], CPU)


@given(lengths=LENGTHS, world_size=st.integers(1, 5), budget=st.integers(1, 300), padded=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_plan_holds_every_row_once_within_the_budget_and_as_many_micro_batches_for_each_rank(
    lengths: list[int], world_size: int, budget: int, padded: bool
) -> None:
    dealt = plan([row(length) for length in lengths], world_size, budget, padded=padded)

    places = [places for of_rank in dealt for places in of_rank]
    assert sorted(place for each in places for place in each) == list(range(len(lengths)))
    assert (len(dealt), len({len(of_rank) for of_rank in dealt})) == (world_size, 1)
    for each in places:
        of_each = [lengths[place] for place in each]
        tokens = len(of_each) * max(of_each, default=0) if padded else sum(of_each)
        assert tokens <= budget or len(each) == 1


@given(lengths=LENGTHS, world_size=st.integers(1, 5), budget=st.integers(100, 300))
@settings(max_examples=200, deadline=None)
def test_a_plan_needs_no_more_micro_batches_than_first_fit_decreasing_is_known_to(
    lengths: list[int], world_size: int, budget: int
) -> None:
    dealt = plan([row(length) for length in lengths], world_size, budget)

    # Fewer than this cannot hold the tokens; rows no longer than the budget waste less than half of all but one.
    fewest = -(-sum(lengths) // budget)
    assert len(dealt[0]) * world_size < 2 * fewest + world_size + 1


@given(lengths=LENGTHS, world_size=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_ranks_cost_the_same_but_for_one_row_where_the_budget_is_ample(lengths: list[int], world_size: int) -> None:
    dealt = plan([row(length) for length in lengths], world_size, 100_000)

    costs = [cost([lengths[place] for places in of_rank for place in places]) for of_rank in dealt]
    assert max(costs) - min(costs) <= cost([max(lengths)]) + 1e-6


def test_attention_counts_for_the_balance_of_long_rows() -> None:
    # The long row costs 2 * 24,576 = 49,152 and the eight others 8 * 4,096 * 7/6 = 38,229. By tokens it would get one.
    lengths = [ATTENTION_TOKENS, *[4_096] * 8]

    dealt = plan([row(length) for length in lengths], 2, 100_000)

    assert sorted(sorted(place for places in of_rank for place in places) for of_rank in dealt) == [
        [0],
        [1, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_micro_batches_of_one_number_cost_about_the_same_on_all_ranks() -> None:
    lengths = [len(each) for each in random_rows(200)]

    first, second = plan([row(length) for length in lengths], 2, 64)

    for left, right in zip(first, second, strict=True):
        costs = [cost([lengths[place] for place in places]) for places in (left, right)]
        assert max(costs) <= 1.1 * min(costs)


def test_a_plan_of_thousands_of_rows_takes_no_time() -> None:
    dice = np.random.default_rng(0)
    rows = [row(int(length)) for length in dice.integers(100, 4000, 4096)]

    begun = time.process_time()
    dealt = plan(rows, 8, 16_384)

    assert len(dealt) == 8
    assert time.process_time() - begun < 2


def test_an_empty_micro_batch_teaches_nothing_and_costs_next_to_nothing() -> None:
    batch = micro_batch(random_rows(2), [], CPU)

    assert (batch.rows, len(batch.ids_T), int(batch.mask_T.sum())) == (1, 1, 0)
    assert all(len(getattr(batch, name)) == 0 for name in COLUMNS)
