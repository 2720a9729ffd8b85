"""Estimators of KL and the controller of its penalty: by hand, against the probabilities, and by finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import reference
from trainer.algorithms.divergence import ESTIMATORS, entropy_and_kl, kl_of_teacher, steered

logps = st.floats(-4, -0.05)


def test_a_token_that_the_policy_finds_twice_as_likely() -> None:
    log_ratio = torch.tensor([math.log(2)], dtype=torch.float64)

    found = {name: float(estimate(log_ratio)) for name, estimate in ESTIMATORS.items()}

    log2 = math.log(2)
    assert found == pytest.approx({"k1": log2, "k2": log2**2 / 2, "k3": 0.5 - 1 + log2, "abs": log2})


@settings(max_examples=60, deadline=None)
@given(policy=logps, other=logps)
def test_every_estimator_equals_its_formula(policy: float, other: float) -> None:
    for name, estimate in ESTIMATORS.items():
        found = float(estimate(torch.tensor(policy - other, dtype=torch.float64)))
        assert found == pytest.approx(reference.divergence(name, policy, other), abs=1e-9), name


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    log_ratio = torch.tensor([-1.3, -0.2, 0.4, 2.0], dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(ESTIMATORS[name], log_ratio)


def test_the_mean_over_samples_of_k1_and_k3_is_the_kl() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    other = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    log_ratio = (policy / other).log()
    exact = float((policy * log_ratio).sum())

    means = {name: float((policy * estimate(log_ratio)).sum()) for name, estimate in ESTIMATORS.items()}

    assert (means["k1"], means["k3"]) == pytest.approx((exact, exact))
    assert means["k2"] != pytest.approx(exact, rel=0.01)


def test_comparisons_of_two_words_by_hand() -> None:
    log_policy, log_other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()

    # Half of log 2/3 and half of log 2; and 3/4 of log 3/2 and 1/4 of log 1/2.
    found = entropy_and_kl(log_policy, log_other)
    assert found.flatten().tolist() == pytest.approx([math.log(2), (math.log(2 / 3) + math.log(2)) / 2])
    taught = kl_of_teacher(log_policy, log_other)
    assert taught.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])


def test_the_penalty_is_steered_towards_its_target_by_bounded_steps() -> None:
    assert steered(0.5, found=6.0, target=6.0, gain=0.1) == 0.5
    assert steered(0.5, found=6.6, target=6.0, gain=0.1) == pytest.approx(0.5 * 1.01)
    assert steered(0.5, found=60.0, target=6.0, gain=0.1) == pytest.approx(0.5 * 1.02)
    assert steered(0.5, found=0.0, target=6.0, gain=0.1) == pytest.approx(0.5 * 0.98)
