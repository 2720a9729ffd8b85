"""What a step tells: quantiles from a histogram, KL by lag, the effective sample."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms.measures import EDGES, kl_by_lag, of_critic, quantile, ratio_counts, readable

log_ratios = st.lists(st.floats(-4.5, 4.5), min_size=1, max_size=60)


def counts_of(log_ratios: list[float]) -> list[float]:
    return [float(count) for count in ratio_counts(torch.tensor(log_ratios)).values()]


def test_under_equal_weights_every_quantile_is_1() -> None:
    counts = counts_of([0.0] * 10)

    assert [quantile(counts, share) for share in (0.01, 0.5, 0.99)] == pytest.approx([1, 1, 1], abs=3e-4)


def test_within_a_bin_a_quantile_is_interpolated() -> None:
    assert quantile(counts_of([0.0] * 10), 0.5) == pytest.approx(1, abs=1e-9)


def test_ratios_beyond_the_last_edges_are_told_as_these() -> None:
    assert quantile(counts_of([-9.0]), 0.5) == pytest.approx(math.exp(-5))
    assert quantile(counts_of([9.0]), 0.5) == pytest.approx(math.exp(5))


@settings(max_examples=100, deadline=None)
@given(values=log_ratios, share=st.sampled_from([0.01, 0.5, 0.99]))
def test_a_quantile_is_off_by_no_more_than_its_bin(values: list[float], share: float) -> None:
    exact = float(np.quantile(np.array(values, np.float32), share, method="inverted_cdf"))

    found = math.log(quantile(counts_of(values), share))

    bin_of = int(np.searchsorted(EDGES, exact))
    low, high = EDGES[max(bin_of - 1, 0)], EDGES[min(bin_of, len(EDGES) - 1)]
    assert low - 1e-6 <= found <= high + 1e-6


def test_bins_are_as_fine_as_they_say() -> None:
    widths = np.diff(EDGES)
    around = np.array(EDGES[1:])

    assert widths.min() < 3e-4
    assert (widths[around > 0.01] / around[around > 0.01]).max() < 0.15
    assert 0.0 not in EDGES


def test_kl_is_told_by_lag() -> None:
    log_ratio, lag = torch.tensor([0.0, 1.0, -1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0, 50.0])

    sums = {name: float(value) for name, value in kl_by_lag(log_ratio, lag).items()}

    e = math.e
    assert (sums["kl_lag_0"], sums["tokens_lag_0"]) == (0, 1)
    assert sums["kl_lag_1"] == pytest.approx((e - 2) + (1 / e), rel=1e-5)
    assert (sums["tokens_lag_1"], sums["tokens_lag_8"]) == (2, 1)


def test_means_become_readable() -> None:
    log_ratio = torch.tensor([math.log(2), math.log(0.5)])
    sums = {
        **ratio_counts(log_ratio),
        **kl_by_lag(log_ratio, torch.tensor([2.0, 2.0])),
        "ratio": torch.tensor(2.5),
        "ratio_square": torch.tensor(4.25),
    }

    found = readable({"loss": 7.0, **{name: float(value) / 2 for name, value in sums.items()}})

    # (2 + 0.5)^2 / (2 * (4 + 0.25)); r - 1 - log r is 1 - log 2 and -0.5 + log 2.
    assert found["effective_sample_share"] == pytest.approx(6.25 / 8.5)
    assert found["kl_behavior_lag_2"] == pytest.approx(0.25)
    assert found["ratio_p99"] == pytest.approx(2, rel=0.11)
    assert found["ratio_p01"] == pytest.approx(0.5, rel=0.11)
    assert found["loss"] == 7.0
    assert set(found) == {
        "loss", "ratio", "ratio_square", "effective_sample_share", "kl_behavior_lag_2", "ratio_p01", "ratio_p50",
        "ratio_p99",
    }  # fmt: skip


def test_a_critics_measures_have_names_of_their_own() -> None:
    means = {
        "loss": 1.0,
        "tokens": 4.0,
        "value": 2.0,
        "return": 2.0,
        "return_square": 5.0,
        "error": 0,
        "error_square": 0,
    }

    assert of_critic(means) == {
        "critic_loss": 1.0,
        "critic_value": 2.0,
        "critic_return": 2.0,
        "critic_explained_variance": 1.0,
    }
