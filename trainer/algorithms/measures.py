"""What a step tells of its tokens: sums that no packing and no number of ranks can change, and what is read from them.

Quantiles come from a histogram over fixed bins, which sums as everything else does. A quantile is off by at most its
bin: 0.0003 about ratio 1, and 15 % of its logarithm far from it.

Legend: T tokens.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from trainer.algorithms.values import explained_variance

# An even number of edges, so that ratio 1 lies in the middle of a bin. The outer ones are log-ratios of 5.
_EDGES = 128
EDGES = [0.002 * math.sinh(math.asinh(2500) * (2 * edge / (_EDGES - 1) - 1)) for edge in range(_EDGES)]
"""Of the bins, as log-ratios: fine about 0, coarse far from it. Beyond the last lies one more bin on either side."""

QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}

LAGS = 8
"""From this lag on tokens are measured together."""


def ratio_counts(log_ratio_T: Tensor) -> dict[str, Tensor]:
    """How many log-ratios fall into each bin."""
    edges = torch.tensor(EDGES, dtype=log_ratio_T.dtype, device=log_ratio_T.device)
    counts = torch.bincount(torch.bucketize(log_ratio_T.detach(), edges), minlength=len(EDGES) + 1)
    return {_bin(index): count for index, count in enumerate(counts.unbind())}


def kl_by_lag(log_ratio_T: Tensor, lag_T: Tensor) -> dict[str, Tensor]:
    """The KL of the policy that sampled to the current one by k3, r - 1 - log r, and the tokens, of each lag.

    log_ratio_T  f32[T]  log current - log behaviour
    lag_T        f32[T]  versions
    """
    log_ratio_T = log_ratio_T.detach()
    kl_T = log_ratio_T.exp() - 1 - log_ratio_T
    of_lag_T = lag_T.long().clamp(0, LAGS)
    sums = kl_T.new_zeros(LAGS + 1).index_add(0, of_lag_T, kl_T)
    counts = torch.bincount(of_lag_T, minlength=LAGS + 1)
    return {f"kl_lag_{lag}": value for lag, value in enumerate(sums.unbind())} | {
        f"tokens_lag_{lag}": value for lag, value in enumerate(counts.unbind())
    }


def readable(means: Mapping[str, float]) -> dict[str, float]:
    """The policy's metrics, each a mean over tokens, with quantiles in place of bins and KL in place of sums by lag.

    `effective_sample_share` is (sum r)^2 / (n sum r^2): 1 where every token counts alike (Kong 1992).
    """
    counts = [means[_bin(index)] for index in range(len(EDGES) + 1)]
    hidden = {_bin(index) for index in range(len(EDGES) + 1)}
    found = {
        name: value
        for name, value in means.items()
        if name not in hidden and not name.startswith(("kl_lag_", "tokens_lag_"))
    }
    if any(counts):
        found |= {name: quantile(counts, share) for name, share in QUANTILES.items()}
    if means["ratio_square"] > 0:
        found["effective_sample_share"] = means["ratio"] ** 2 / means["ratio_square"]
    for lag in range(LAGS + 1):
        if means[f"tokens_lag_{lag}"] > 0:
            name = f"kl_behavior_lag_{lag}" + ("_or_more" if lag == LAGS else "")
            found[name] = means[f"kl_lag_{lag}"] / means[f"tokens_lag_{lag}"]
    return found


def of_critic(means: Mapping[str, float]) -> dict[str, float]:
    """The critic's metrics, each a mean over tokens, under names of its own."""
    raw = ("return", "return_square", "error", "error_square")
    shown = {f"critic_{name}": value for name, value in means.items() if name not in (*raw, "tokens")}
    return shown | {
        "critic_return": means["return"],
        "critic_explained_variance": explained_variance(
            means["error"], means["error_square"], means["return"], means["return_square"]
        ),
    }


def quantile(counts: list[float], share: float) -> float:
    """The ratio that this share of the tokens does not exceed, by the tokens (or their shares) in each bin."""
    upto = list(accumulate(counts))
    wanted = share * upto[-1]
    index = min(bisect_left(upto, wanted), len(counts) - 1)
    if index == 0:
        return math.exp(EDGES[0])
    if index == len(EDGES):
        return math.exp(EDGES[-1])
    within = (wanted - upto[index - 1]) / counts[index]
    return math.exp(EDGES[index - 1] + within * (EDGES[index] - EDGES[index - 1]))


def _bin(index: int) -> str:
    return f"log_ratio_bin_{index:03d}"
