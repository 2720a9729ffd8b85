"""What a critic learns: by hand, against the formula, and by finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer import reference
from trainer.algorithms.values import explained_variance, value_loss

numbers = st.floats(-3, 3)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_value_that_moved_beyond_the_clip_has_the_worse_error_and_no_gradient() -> None:
    value, old, target = f64(1.0, 0.1, -1.0).requires_grad_(), f64(0.0, 0.0, 0.0), f64(2.0, 2.0, 2.0)

    loss, metrics = value_loss(value, old, target, clip=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), value)

    # The first went too far in the right direction: its clipped 0.2 counts. The last went the wrong way: itself counts.
    assert loss.tolist() == pytest.approx([1.8**2 / 2, 1.9**2 / 2, 3.0**2 / 2])
    assert gradient.tolist() == pytest.approx([0.0, -1.9, -3.0])
    assert metrics["clipped"] == 1
    assert (metrics["value"], metrics["return"], metrics["error_square"]) == pytest.approx((0.1, 6.0, 12.0))


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    loss, metrics = value_loss(f64(5.0), f64(0.0), f64(1.0), clip=0)

    assert (loss.tolist(), float(metrics["clipped"])) == ([8.0], 0)


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), clip=st.sampled_from([0.1, 0.5]))
def test_the_value_loss_equals_its_formula_token_by_token(
    tokens: list[tuple[float, float, float]], clip: float
) -> None:
    values, olds, targets = zip(*tokens, strict=True)

    loss, _ = value_loss(f64(*values), f64(*olds), f64(*targets), clip=clip)

    assert loss.tolist() == pytest.approx([reference.value_loss(*token, clip) for token in tokens], abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(offset=st.sampled_from([-0.9, -0.3, 0.15, 0.4, 1.1]), target=st.sampled_from([-2.0, 0.05, 1.7]))
def test_its_gradient_is_that_of_finite_differences(offset: float, target: float) -> None:
    value = f64(offset).requires_grad_()

    assert torch.autograd.gradcheck(lambda value: value_loss(value, f64(0.0), f64(target), clip=0.2)[0], value)


def test_explained_variance_is_1_of_a_perfect_critic_and_0_of_a_constant_one() -> None:
    # Returns 1 and 3: mean 2, mean square 5.
    assert explained_variance(error=0.0, error_square=0.0, returned=2.0, return_square=5.0) == 1
    assert explained_variance(error=2.0, error_square=5.0, returned=2.0, return_square=5.0) == 0
    assert explained_variance(error=0.0, error_square=9.0, returned=2.0, return_square=4.0) == 0
