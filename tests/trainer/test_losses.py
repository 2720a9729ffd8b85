"""Losses and corrections: worked out by hand, against the formulas token by token, and by finite differences."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer import reference
from trainer.algorithms import correction, losses
from trainer.algorithms.losses import LOSSES, Tokens, off_policy

STEP = 1e-6
"""Of a finite difference."""


def tokens_of(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    sequences: Sequence[int] | None = None,
    actions: Sequence[int] | None = None,
    proximal: Sequence[float] | None = None,
) -> Tokens:
    """Tokens of these ratios to a behaviour policy that was certain of each."""
    sequences = sequences or [0] * len(ratios)
    logp = torch.log(torch.tensor(ratios, dtype=torch.float64)).requires_grad_()
    return Tokens(
        logp,
        torch.zeros(len(ratios), dtype=torch.float64),
        torch.log(torch.tensor(proximal or [1.0] * len(ratios), dtype=torch.float64)),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(sequences),
        torch.tensor(actions or sequences),
        max(sequences) + 1,
    )


def gradient(loss_T: Tensor, tokens: Tokens) -> list[float]:
    (found,) = torch.autograd.grad(loss_T.sum(), tokens.logp_T)
    return found.tolist()


def test_clipped_stops_where_the_ratio_left_its_bounds_in_the_direction_of_the_advantage() -> None:
    tokens = tokens_of([1.0, 1.5, 1.5, 0.5, 0.5, 4.0], [1, 1, -1, 1, -1, -1])

    loss, metrics = losses.clipped(tokens, clip_low=0.2, clip_high=0.28, dual_clip=3.0)

    assert loss.tolist() == pytest.approx([-1.0, -1.28, 1.5, -0.5, 0.8, 3.0])
    assert gradient(loss, tokens) == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0, 0.0])
    assert metrics["clipped"] == 3


def test_truncated_bounds_the_weight_and_keeps_the_gradient() -> None:
    tokens = tokens_of([8.0, 0.5], [1, 1])

    loss, _ = losses.truncated(tokens, weight_high=2)

    assert gradient(loss, tokens) == pytest.approx([-2.0, -0.5])


def test_cispo_bounds_the_weight_about_one() -> None:
    tokens = tokens_of([8.0, 0.25], [1, -1])

    loss, _ = losses.cispo(tokens, clip_low=0.5, clip_high=1.0)

    assert gradient(loss, tokens) == pytest.approx([-2.0, 0.5])


def test_topr_weighs_only_what_is_to_become_less_likely() -> None:
    tokens = tokens_of([4.0, 4.0, 0.25], [1, -1, -1])

    loss, _ = losses.topr(tokens)

    assert gradient(loss, tokens) == pytest.approx([-1.0, 1.0, 0.25])


def test_kimi_is_drawn_back_to_its_anchor() -> None:
    tokens = tokens_of([math.e, 1.0], [0, 2])

    loss, _ = losses.kimi(tokens, tau=0.5)

    assert loss.tolist() == pytest.approx([0.25, 0.0])
    assert gradient(loss, tokens) == pytest.approx([0.5, -2.0])


def test_gspo_has_one_ratio_for_a_sequence_or_for_an_action() -> None:
    tokens = tokens_of([4.0, 1.0, 1.0], [1, 1, 1], sequences=[0, 0, 0], actions=[0, 0, 1])

    by_sequence, _ = losses.gspo(tokens, clip_low=0.9, clip_high=9)
    by_action, _ = losses.gspo(tokens, per="action", clip_low=0.9, clip_high=9)

    assert by_sequence.tolist() == pytest.approx([-(4 ** (1 / 3))] * 3)
    assert by_action.tolist() == pytest.approx([-2, -2, -1])
    assert gradient(by_action, tokens) == pytest.approx([-2, -2, -1])


def test_gmpo_bounds_each_log_ratio_and_takes_their_mean() -> None:
    tokens = tokens_of([math.exp(0.8), math.exp(-0.8)], [1, 1])

    loss, metrics = losses.gmpo(tokens, clip_low=0.4, clip_high=0.4)

    # 0.8 is cut to 0.4, -0.8 stays: exp(-0.2).
    assert loss.tolist() == pytest.approx([-math.exp(-0.2)] * 2)
    assert metrics["clipped"] == 1


def test_reinforce_weighs_a_stale_token_unless_told_not_to() -> None:
    tokens = tokens_of([2.0], [3])

    corrected, _ = losses.reinforce(tokens)
    plain, _ = losses.reinforce(tokens, correct=False)

    assert gradient(corrected, tokens) == pytest.approx([-6.0])
    assert gradient(plain, tokens) == pytest.approx([-3.0])


def test_the_anchor_says_what_the_ratio_is_to() -> None:
    tokens = tokens_of([3.0], [1], proximal=[2.0])

    to_proximal, _ = losses.clipped(tokens, anchor="proximal", clip_high=9)

    assert to_proximal.tolist() == pytest.approx([-1.5])


def test_corrections_by_token_by_sequence_and_by_geometric_mean() -> None:
    tokens = tokens_of([1.0] * 3, [1] * 3, sequences=[0, 0, 1], proximal=[4.0, 0.25, 3.0])

    assert correction.truncated(tokens, high=2).tolist() == pytest.approx([2, 0.25, 2])
    assert correction.truncated(tokens, level="sequence", high=2).tolist() == pytest.approx([1, 1, 2])
    assert correction.truncated(tokens, level="geometric", high=9).tolist() == pytest.approx([1, 1, 3])
    assert correction.masked(tokens, low=0.5, high=3.5).tolist() == pytest.approx([0, 0, 3])
    assert correction.none(tokens).tolist() == [1, 1, 1]
    assert not correction.truncated(tokens).requires_grad


def test_how_far_off_policy_the_weights_are() -> None:
    metrics = off_policy(tokens_of([2.0, 0.5], [1, 1]))

    assert metrics["ratio"] == pytest.approx(2.5)
    assert metrics["ratio_square"] == pytest.approx(4.25)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["kl_behavior"] == pytest.approx(2.5 - 2)
    assert metrics["behavior_gap_max"] == pytest.approx(math.log(2))


def test_a_micro_batch_in_which_the_policy_wrote_nothing_has_no_loss() -> None:
    empty = torch.zeros(0, requires_grad=True)
    nothing = Tokens(empty, empty, empty, empty, empty.long(), empty.long(), 1)

    for name, loss in LOSSES.items():
        loss_T, _ = loss(nothing)
        assert loss_T.sum() == 0, name
    assert all(torch.isfinite(value) for value in off_policy(nothing).values())
    assert len(correction.truncated(nothing, level="sequence")) == 0


# Away from the kinks at the bounds of the clips, where a finite difference means nothing.
log_ratios = st.sampled_from([-1.7, -0.6, -0.31, -0.1, 0.0, 0.11, 0.33, 0.7, 1.9])
advantages = st.sampled_from([-2.0, -0.5, 0.0, 1.5])
Sequences = list[tuple[float, list[float]]]
"""Each an advantage and its tokens' log-ratios to the behaviour policy."""


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(st.tuples(advantages, st.lists(log_ratios, min_size=1, max_size=5)), min_size=1, max_size=4))
def test_every_loss_equals_its_formula_token_by_token(batch: Sequences) -> None:
    tokens = _of_sequences(batch)
    each = list(zip(tokens.logp_T.tolist(), tokens.behavior_logp_T.tolist(), tokens.advantage_T.tolist(), strict=True))
    whole = [(ratios, advantage) for advantage, ratios in batch for _ in ratios]
    expected: dict[str, list[float]] = {
        "clipped": [reference.clipped(*token, low=0.2, high=0.28, dual=3.0) for token in each],
        "truncated": [reference.weighted(*token, low=0.0, high=2.0) for token in each],
        "cispo": [reference.weighted(*token, low=0.0, high=3.0) for token in each],
        "reinforce": [reference.weighted(*token, low=0.0, high=math.inf) for token in each],
        "topr": [reference.topr(*token) for token in each],
        "kimi": [reference.kimi(*token, tau=0.1) for token in each],
        "gspo": [reference.gspo(*sequence, low=3e-4, high=4e-4) for sequence in whole],
        "gmpo": [reference.gmpo(*sequence, low=0.4, high=0.4) for sequence in whole],
    }
    assert expected.keys() == LOSSES.keys()

    for name, values in expected.items():
        assert LOSSES[name](tokens)[0].tolist() == pytest.approx(values, rel=1e-9, abs=1e-12), name


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(st.tuples(advantages, st.lists(log_ratios, min_size=1, max_size=5)), min_size=1, max_size=4))
def test_every_correction_equals_its_formula_token_by_token(batch: Sequences) -> None:
    tokens = _of_sequences(batch)
    gaps = (tokens.proximal_logp_T - tokens.behavior_logp_T).tolist()
    sequence_T = tokens.sequence_T.tolist()

    for level in ("token", "sequence", "geometric"):
        weights = reference.weights(gaps, sequence_T, level)
        truncated = [min(max(weight, 0.3), 1.6) for weight in weights]
        masked = [weight if 0.5 <= weight <= 1.6 else 0.0 for weight in weights]
        assert correction.truncated(tokens, level=level, low=0.3, high=1.6).tolist() == pytest.approx(truncated), level
        assert correction.masked(tokens, level=level, low=0.5, high=1.6).tolist() == pytest.approx(masked), level


@settings(max_examples=25, deadline=None)
@given(batch=st.lists(st.tuples(advantages, st.lists(log_ratios, min_size=1, max_size=4)), min_size=1, max_size=3))
def test_gradients_are_those_of_finite_differences(batch: Sequences) -> None:
    """Where a loss stops the gradient of its weight, the weight is held in the difference as well."""
    tokens = _of_sequences(batch)
    held = torch.exp(tokens.log_ratio_T("behavior")).detach()

    def gradient_policy(weight: Callable[[Tensor], Tensor]) -> Callable[[Tokens], Tensor]:
        return lambda moved: -weight(held) * moved.advantage_T * moved.logp_T

    smooth: dict[str, Callable[[Tokens], Tensor]] = {
        "clipped": lambda moved: losses.clipped(moved)[0],
        # A sequence's tokens share one advantage: the gradient that its ratio has is then what is shared out to them.
        "gspo": lambda moved: losses.gspo(moved)[0],
        "gmpo": lambda moved: losses.gmpo(moved)[0],
        "kimi": lambda moved: losses.kimi(moved)[0],
        "truncated": gradient_policy(lambda ratio: ratio.clamp(0, 2)),
        "cispo": gradient_policy(lambda ratio: ratio.clamp(0, 3)),
        "reinforce": gradient_policy(lambda ratio: ratio),
        "topr": gradient_policy(lambda ratio: torch.where(tokens.advantage_T < 0, ratio.clamp(0, 1), 1.0)),
    }
    assert smooth.keys() == LOSSES.keys()
    for name, value in smooth.items():
        found = gradient(LOSSES[name](tokens)[0], tokens)
        assert found == pytest.approx(_differences(value, tokens), rel=1e-4, abs=1e-6), name


def _of_sequences(batch: Sequences) -> Tokens:
    ratios = torch.tensor([ratio for _, sequence in batch for ratio in sequence], dtype=torch.float64)
    behavior = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    sequence_T = torch.tensor([index for index, (_, sequence) in enumerate(batch) for _ in sequence])
    return Tokens(
        (behavior + ratios).requires_grad_(),
        behavior,
        behavior + ratios / 2,
        torch.tensor([advantage for advantage, sequence in batch for _ in sequence], dtype=torch.float64),
        sequence_T,
        sequence_T,
        len(batch),
    )


def _differences(value: Callable[[Tokens], Tensor], tokens: Tokens) -> list[float]:
    def at(index: int, move: float) -> float:
        logp_T = tokens.logp_T.detach().clone()
        logp_T[index] += move
        moved = Tokens(
            logp_T,
            tokens.behavior_logp_T,
            tokens.proximal_logp_T,
            tokens.advantage_T,
            tokens.sequence_T,
            tokens.action_T,
            tokens.sequences,
        )
        return float(value(moved).sum())

    return [(at(index, STEP) - at(index, -STEP)) / (2 * STEP) for index in range(len(tokens.logp_T))]
