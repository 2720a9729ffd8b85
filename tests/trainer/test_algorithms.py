import math

import numpy as np
import pytest
import torch

from trainer.algorithms.advantages import ADVANTAGES, batch_grpo, centered, grpo, rloo
from trainer.algorithms.aggregation import AGGREGATIONS, seq_mean_token_mean, seq_mean_token_sum_norm, token_mean
from trainer.algorithms.losses import LOSSES, clipped, reinforce, truncated


def rewards(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_grpo_measures_rewards_in_standard_deviations_of_their_group() -> None:
    assert grpo(rewards([0, 0, 4, 4])).tolist() == [[-1, -1, 1, 1]]


def test_centered_only_takes_the_mean_away() -> None:
    assert centered(rewards([0, 1, 5])).tolist() == [[-2, -1, 3]]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert rloo(rewards([0, 3, 6])).tolist() == [[-4.5, 0, 4.5]]


def test_batch_grpo_divides_by_the_deviation_of_the_whole_batch() -> None:
    assert batch_grpo(rewards([0, 2], [0, 2])).tolist() == [[-1, 1], [-1, 1]]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_that_agrees_and_a_lone_member_get_zeros(name: str) -> None:
    advantage = ADVANTAGES[name]

    assert advantage(rewards([0.1, 0.1, 0.1])).tolist() == [[0, 0, 0]]
    assert advantage(rewards([0.7])).tolist() == [[0]]


def test_clipped_stops_where_the_ratio_left_its_bounds_in_the_direction_of_the_advantage() -> None:
    logp = torch.log(torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 4.0])).requires_grad_()
    behavior = torch.zeros(6)
    advantage = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    mask = torch.ones(6, dtype=torch.bool)

    loss, metrics = clipped(logp, behavior, advantage, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    loss.sum().backward()

    assert loss.tolist() == pytest.approx([-1.0, -1.28, 1.5, -0.5, 0.8, 3.0])
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0, 0.0])
    assert metrics["clipped"] == 3
    assert metrics["ratio_max"] == pytest.approx(4.0)


def test_truncated_bounds_the_weight_and_keeps_the_gradient() -> None:
    logp = torch.log(torch.tensor([8.0, 0.5])).requires_grad_()

    loss, _ = truncated(logp, torch.zeros(2), torch.tensor([1.0, 1.0]), torch.ones(2, dtype=torch.bool), weight_high=2)
    loss.sum().backward()

    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-2.0, -0.5])


def test_reinforce_weighs_a_stale_token_unless_told_not_to() -> None:
    logp, mask = torch.log(torch.tensor([0.5])), torch.ones(1, dtype=torch.bool)
    behavior, advantage = torch.log(torch.tensor([0.25])), torch.tensor([3.0])

    corrected, _ = reinforce(logp, behavior, advantage, mask)
    plain, _ = reinforce(logp, behavior, advantage, mask, correct=False)

    assert corrected.item() == pytest.approx(-2 * 3 * math.log(0.5))
    assert plain.item() == pytest.approx(-3 * math.log(0.5))


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(name: str) -> None:
    logp = torch.tensor([-1.0, 3.0, -2.0], requires_grad=True)
    poison = torch.tensor([-1.1, float("nan"), -2.1])
    mask = torch.tensor([True, False, True])
    advantage = torch.tensor([1.0, 1.0, -1.0])

    loss, metrics = LOSSES[name](logp, poison, advantage, mask)
    loss.sum().backward()
    alone, alone_metrics = LOSSES[name](logp[mask], poison[mask], advantage[mask], mask[mask])

    assert loss[1] == 0
    assert logp.grad is not None
    assert logp.grad[1] == 0
    assert loss.sum().item() == pytest.approx(alone.sum().item())
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(
        {key: value.item() for key, value in alone_metrics.items()}
    )


def test_clipped_equals_a_float64_reference() -> None:
    dice = np.random.default_rng(0)
    logp, behavior = dice.normal(-2, 1, 200), dice.normal(-2, 1, 200)
    advantage, mask = dice.normal(0, 1, 200), dice.random(200) < 0.6
    ratio = np.exp(logp - behavior)
    objective = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    objective = np.where(advantage < 0, np.maximum(objective, 3 * advantage), objective)
    kl = ratio - 1 - np.log(ratio)

    loss, metrics = clipped(torch.tensor(logp), torch.tensor(behavior), torch.tensor(advantage), torch.tensor(mask))

    assert loss.numpy() == pytest.approx(np.where(mask, -objective, 0))
    assert metrics["ratio"].item() == pytest.approx(ratio[mask].sum())
    assert metrics["kl_behavior"].item() == pytest.approx(kl[mask].sum())


def test_token_mean_counts_tokens_and_sequence_means_count_trajectories() -> None:
    mask = torch.tensor([[True, False, True, True], [False, True, False, False], [False, False, False, False]])

    by_token, tokens = token_mean(mask)
    by_sequence, sequences = seq_mean_token_mean(mask)
    by_constant, _ = seq_mean_token_sum_norm(mask, length=10)

    assert (by_token.sum().item(), tokens) == (4, 4)
    assert by_sequence.sum(1).tolist() == pytest.approx([1, 1, 0])
    assert sequences == 2
    assert by_constant.sum().item() == pytest.approx(0.4)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_padding_and_splitting_never_change_weights_or_shares(name: str) -> None:
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    padded = torch.cat([mask, torch.zeros(5, 3, dtype=torch.bool)], dim=1)

    whole, share = AGGREGATIONS[name](padded)
    parts = [AGGREGATIONS[name](mask[row : row + 1]) for row in range(5)]

    assert torch.equal(whole[:, :9], torch.cat([weights for weights, _ in parts]))
    assert share == sum(part for _, part in parts)
