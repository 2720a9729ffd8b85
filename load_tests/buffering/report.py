"""Figures from what was measured: medians over rounds, as one JSON object and as a table for people."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from load_tests.buffering.clients import Flow

Figures = dict[str, object]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def milliseconds(rounds: Sequence[Sequence[float]], share: float) -> float:
    """The median over the rounds of one quantile of their latencies."""
    return round(1000 * median(quantile(latencies, share) for latencies in rounds), 2)


def cpu_per_thousand(flows: Sequence[Flow]) -> dict[str, float]:
    """CPU seconds of each process for a thousand samples."""
    return {name: round(median(1000 * flow.cpu[name] / flow.samples for flow in flows), 4) for name in flows[0].cpu}


def table(figures: Mapping[str, object]) -> str:
    """One figure a line."""
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {_text(value)}" for name, value in figures.items())


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {part}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int | float) else str(value)
