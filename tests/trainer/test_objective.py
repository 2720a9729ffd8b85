"""Whole objectives on random masked batches: against float64 formulas on padded rows, gradient included."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer import reference
from tests.trainer.conftest import random_rows
from tests.trainer.reference import F64
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.losses import LOSSES
from trainer.config import TrainerConfig
from trainer.micro_batches import MicroBatch, micro_batch
from trainer.objective import LossFn, ValueObjective, policy_objective
from trainer.rows import Row, column, with_column

CPU = torch.device("cpu")
STEP = 1e-6
PerToken = Callable[[float, float, float], float]
"""Current and behaviour log-probability and advantage, to a loss."""


def batch_of(rows: list[Row]) -> MicroBatch:
    return micro_batch(rows, range(len(rows)), CPU)


def current(rows: list[Row], seed: int) -> Tensor:
    """f64[P], away from the kinks of clips at ratios of 0.8 and 1.28."""
    dice = np.random.default_rng(seed)
    moves = dice.choice([-0.9, -0.4, -0.1, 0.0, 0.12, 0.5, 1.1], sum(row.policy_tokens for row in rows))
    return column(rows, "behavior_logp_P") + torch.from_numpy(moves)


def padded(rows: list[Row], values_P: Tensor) -> tuple[F64, np.ndarray]:
    """f64[R, T], where the policy wrote, and nothing that could be added up elsewhere; and the mask."""
    width = max(map(len, rows))
    mask_RT = np.array([np.pad(row.mask_T, (0, width - len(row))) for row in rows])
    values_RT = np.full(mask_RT.shape, np.nan)
    values_RT[mask_RT] = values_P.detach().numpy()
    return values_RT, mask_RT


def value_and_gradient(objective: LossFn, rows: list[Row], logp_P: Tensor, norm: float) -> tuple[float, list[float]]:
    leaf_P = logp_P.clone().requires_grad_()
    loss_sum, _ = objective(leaf_P, torch.zeros_like(leaf_P), batch_of(rows))
    loss = loss_sum / norm
    (gradient,) = torch.autograd.grad(loss, leaf_P)
    return float(loss.detach()), gradient.tolist()


def differences(value: Callable[[Tensor], float], at_P: Tensor) -> list[float]:
    def moved(index: int, step: float) -> float:
        other_P = at_P.clone()
        other_P[index] += step
        return value(other_P)

    return [(moved(index, STEP) - moved(index, -STEP)) / (2 * STEP) for index in range(len(at_P))]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 5))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_of_the_clipped_loss_obeys_the_mask(aggregation: str, seed: int, count: int) -> None:
    rows = random_rows(count, seed=seed)
    objective = policy_objective(TrainerConfig(aggregation=aggregation))

    def expected(logp_P: Tensor) -> float:
        def loss(pi: float, mu: float, a: float) -> float:
            return reference.clipped(pi, mu, a, low=0.2, high=0.28, dual=3.0)

        parts = [logp_P, column(rows, "behavior_logp_P"), column(rows, "advantage_P")]
        losses_P = [loss(*token) for token in zip(*(part.tolist() for part in parts), strict=True)]
        return reference.aggregated(aggregation, *padded(rows, torch.tensor(losses_P, dtype=torch.float64)))

    logp_P = current(rows, seed)
    loss, gradient = value_and_gradient(objective, rows, logp_P, objective.norm(rows))

    assert loss == pytest.approx(expected(logp_P), rel=1e-5, abs=1e-6)
    assert gradient == pytest.approx(differences(expected, logp_P), rel=1e-4, abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_to_the_reference_is_added_to_the_loss_of_each_token(estimator: str, seed: int) -> None:
    rows = random_rows(3, seed=seed)
    tokens = sum(row.policy_tokens for row in rows)
    dice = torch.Generator().manual_seed(seed)
    reference_P = (
        column(rows, "behavior_logp_P") + 0.3 * torch.randn(tokens, generator=dice, dtype=torch.float64) + 0.01
    )
    rows = with_column(with_column(rows, "reference_logp_P", reference_P), "advantage_P", torch.zeros(tokens))
    objective = policy_objective(TrainerConfig.model_validate({"kl": {"loss": 0.5, "loss_estimator": estimator}}))
    reference_P = column(rows, "reference_logp_P")

    def expected(logp_P: Tensor) -> float:
        pairs = zip(logp_P.tolist(), reference_P.tolist(), strict=True)
        return 0.5 * sum(reference.divergence(estimator, *pair) for pair in pairs) / tokens

    logp_P = current(rows, seed)
    loss, gradient = value_and_gradient(objective, rows, logp_P, objective.norm(rows))

    assert loss == pytest.approx(expected(logp_P), rel=1e-5, abs=1e-6)
    assert gradient == pytest.approx(differences(expected, logp_P), rel=1e-4, abs=1e-6)


def test_entropy_is_subtracted_by_its_weight_and_measured() -> None:
    rows = random_rows(2)
    tokens = sum(row.policy_tokens for row in rows)
    rows = with_column(rows, "advantage_P", torch.zeros(tokens))
    entropy_P = torch.linspace(0, 1, tokens).requires_grad_()

    objective = policy_objective(TrainerConfig(entropy_bonus=0.25))
    loss_sum, metrics = objective(current(rows, 0), entropy_P, batch_of(rows))
    (gradient,) = torch.autograd.grad(loss_sum, entropy_P)

    assert float(loss_sum.detach()) == pytest.approx(-0.25 * tokens / 2)
    assert gradient.tolist() == [-0.25] * tokens
    assert float(metrics["entropy"]) == pytest.approx(tokens / 2)


def test_a_full_kl_comes_with_the_policy_and_the_entropy_is_measured_beside_it() -> None:
    rows = random_rows(2)
    tokens = sum(row.policy_tokens for row in rows)
    rows = with_column(rows, "advantage_P", torch.zeros(tokens))
    kl_P = torch.linspace(0, 1, tokens).requires_grad_()

    settings = {"kl": {"loss": 0.5, "loss_estimator": "full"}, "entropy_bonus": 0.5}
    objective = policy_objective(TrainerConfig.model_validate(settings))
    loss_sum, metrics = objective(current(rows, 0), torch.stack([torch.ones(tokens), kl_P]), batch_of(rows))
    (gradient,) = torch.autograd.grad(loss_sum, kl_P)

    assert float(loss_sum.detach()) == pytest.approx(0.5 * tokens / 2 - 0.5 * tokens)
    assert gradient.tolist() == [0.5] * tokens
    assert float(metrics["kl_reference"]) == pytest.approx(tokens / 2)
    assert float(metrics["entropy"]) == tokens


def test_a_correction_weighs_each_token_and_is_measured() -> None:
    row = Row(
        np.arange(4, dtype=np.int32),
        np.array([False, True, True, True]),
        behavior_logp_P=np.log(np.array([0.5, 0.5, 0.5], np.float32)),
        proximal_logp_P=np.log(np.array([0.25, 0.5, 0.05], np.float32)),
        advantage_P=np.ones(3, np.float32),
    )
    settings = {"loss_settings": {"anchor": "proximal"}, "correction": "masked", "steps_per_batch": 2}
    objective = policy_objective(TrainerConfig.model_validate(settings))

    loss_sum, metrics = objective(torch.from_numpy(row.proximal_logp_P), torch.zeros(3), batch_of([row]))

    # Current to proximal is 1; proximal to behaviour 0.5, 1 and 0.1, of which the last is masked.
    assert float(loss_sum) == pytest.approx(-(0.5 + 1.0 + 0.0))
    assert (float(metrics["correction"]), float(metrics["correction_zero"])) == (pytest.approx(1.5), 1)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_critics_objective_is_the_mean_over_tokens_in_the_mask(seed: int) -> None:
    rows = random_rows(3, seed=seed)
    tokens = sum(row.policy_tokens for row in rows)
    dice = torch.Generator().manual_seed(seed)
    old_P, return_P, value_P = torch.randn(3, tokens, generator=dice, dtype=torch.float64)
    rows = with_column(with_column(rows, "old_value_P", old_P), "return_P", return_P)
    objective = ValueObjective(clip=0.2)
    old_P, return_P = column(rows, "old_value_P"), column(rows, "return_P")

    def expected(value_P: Tensor) -> float:
        each = zip(value_P.tolist(), old_P.tolist(), return_P.tolist(), strict=True)
        return sum(reference.value_loss(*token, 0.2) for token in each) / tokens

    loss, gradient = value_and_gradient(objective, rows, value_P, objective.norm(rows))

    assert loss == pytest.approx(expected(value_P), rel=1e-5, abs=1e-6)
    assert gradient == pytest.approx(differences(expected, value_P), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_where_the_policy_wrote_nothing_there_is_no_loss_whatever_is_configured(loss: str) -> None:
    row = Row(np.arange(5, dtype=np.int32), np.zeros(5, np.bool_))
    everything = {"loss": loss, "kl": {"loss": 1.0}, "entropy_bonus": 1.0}
    objective = policy_objective(TrainerConfig.model_validate(everything))
    nothing = torch.zeros(0, requires_grad=True)

    loss_sum, metrics = objective(nothing, nothing, batch_of([row]))

    assert float(loss_sum.detach()) == 0
    assert all(torch.isfinite(value) for value in metrics.values())
