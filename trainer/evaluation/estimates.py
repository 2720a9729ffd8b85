"""pass@k and avg@n with their intervals, from how often each task was passed. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

LEVEL = 0.95
"""Confidence of the intervals."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks."""

    value: float

    low: float | None
    """The interval's ends; unset of one task, which says nothing about others."""

    high: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The chance that one of k episodes of a task passes, by `samples` of them of which `passed` did, without bias.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374), equation 1, as a product so that nothing overflows.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / each for each in range(samples - passed + 1, samples + 1))


def over_tasks(values: Sequence[float], *, lowest: float = -math.inf, highest: float = math.inf) -> Estimate:
    """The mean of what each task came to, and its interval, whose ends lie within the bounds.

    Episodes of one task are not independent, so tasks are the clusters: with T tasks of equally many episodes, whose
    means are m_t, the clustered standard error is sqrt(sum_t (m_t - m)^2 / (T (T - 1))), and the interval m +- z SE
    with z = 1.96 (Miller 2024, arXiv 2411.00640, section 2.2, with Bessel's correction). Of few tasks it is too narrow.
    """
    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean, None, None)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count * (count - 1)))
    reach = NormalDist().inv_cdf(0.5 + LEVEL / 2) * error
    return Estimate(mean, max(lowest, mean - reach), min(highest, mean + reach))
