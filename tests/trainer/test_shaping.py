"""Shaping of rewards and advantages: by hand, and against the formulas."""

from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer import reference
from trainer.algorithms import shaping
from trainer.algorithms.shaping import Moments

numbers = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=8)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_length_penalty_rises_over_its_buffer() -> None:
    tokens = torch.tensor([5, 6, 8, 10, 11])

    found = shaping.overlong(tokens, limit=10, buffer=4, penalty=2.0)

    assert found.tolist() == [0, 0, -1, -2, -2]
    assert shaping.overlong(tokens, limit=10, buffer=0, penalty=1.0).tolist() == [0, 0, 0, 0, -1]


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 40), limit=st.integers(1, 30), buffer=st.integers(1, 30))
def test_the_length_penalty_equals_its_formula(tokens: int, limit: int, buffer: int) -> None:
    buffer = min(buffer, limit)

    found = shaping.overlong(torch.tensor([tokens]), limit=limit, buffer=buffer, penalty=1.0)

    assert float(found) == pytest.approx(reference.overlong(tokens, limit, buffer))


def test_rewards_are_normalised_over_the_group_the_batch_or_the_run() -> None:
    rewards, groups, none_yet = f64(0, 2, 6, 6), torch.tensor([0, 0, 1, 1]), Moments()

    by_group, factors = shaping.standardized(rewards, groups, "group", none_yet)
    by_batch, _ = shaping.standardized(rewards, groups, "batch", none_yet)
    by_run, _ = shaping.standardized(rewards, groups, "running", Moments(4, 1.0, 16.0))
    untouched, ones = shaping.standardized(rewards, groups, "none", none_yet)

    # A group that agrees gets zeros. The batch's mean is 3.5, its variance 6.75; the run's are 1 and 4.
    assert (by_group.tolist(), factors.tolist()) == ([-1, 1, 0, 0], [1, 1, 0, 0])
    assert by_batch.tolist() == pytest.approx([value / 6.75**0.5 for value in (-3.5, -1.5, 2.5, 2.5)])
    assert by_run.tolist() == [-0.5, 0.5, 2.5, 2.5]
    assert (untouched.tolist(), ones.tolist()) == (rewards.tolist(), [1, 1, 1, 1])


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(numbers, min_size=1, max_size=4))
def test_moments_of_several_batches_are_those_of_all_their_values(batches: list[list[float]]) -> None:
    moments = Moments()
    for batch in batches:
        moments = moments.with_more(f64(*batch))

    values = [value for batch in batches for value in batch]
    assert (moments.count, moments.mean) == (len(values), pytest.approx(fmean(values)))
    assert moments.std == pytest.approx(pstdev(values), abs=1e-9)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_tokens() -> None:
    assert shaping.whitened(f64(1, 1, 4, 4)).tolist() == [-1, -1, 1, 1]
    assert shaping.whitened(f64(3, 3)).tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(values=numbers)
def test_whitening_equals_its_formula(values: list[float]) -> None:
    assert shaping.whitened(f64(*values)).tolist() == pytest.approx(reference.whitened(values), abs=1e-9)


def test_a_bound_of_0_is_none() -> None:
    assert shaping.bounded(f64(-3, 1, 3), 2.0).tolist() == [-2, 1, 2]
    assert shaping.bounded(f64(-3, 1, 3), 0.0).tolist() == [-3, 1, 3]


def test_the_weight_of_a_length_is_a_power_of_the_mean_length_over_it() -> None:
    tokens = torch.tensor([2, 6])

    assert shaping.length_weights(tokens, 1.0).tolist() == pytest.approx([2, 2 / 3])
    assert shaping.length_weights(tokens, 0.0).tolist() == [1, 1]
    # Whole trajectories count alike then.
    assert (shaping.length_weights(tokens, 1.0) * tokens).tolist() == pytest.approx([4, 4])


def test_groups_that_always_or_never_succeed_are_of_no_use() -> None:
    rewards, groups = f64(0, 0, 1, 0, 1, 1), torch.tensor([0, 0, 1, 1, 2, 2])

    def kept(low: float | None, high: float | None) -> list[bool]:
        return shaping.of_fit_difficulty(rewards, groups, low, high).tolist()

    assert kept(0, 1) == [False, False, True, True, False, False]
    assert kept(None, 1) == [True, True, True, True, False, False]
    assert kept(None, None) == [True] * 6
