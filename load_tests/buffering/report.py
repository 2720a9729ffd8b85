"""Figures from what was measured: medians over rounds, as one JSON object and as a table for people."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from load_tests.buffering.clients import Flow

Figures = dict[str, object]
Rounds = Sequence[Flow]
"""One flow for each round."""


def figures(flows: Mapping[str, Sequence[Flow]]) -> Figures:
    """What was measured, by name, a flow for each round."""
    made: Figures = {f"{name}_per_s": round(median(flow.per_second for flow in some)) for name, some in flows.items()}
    made["commit_samples"] = round(median(flow.samples / flow.commits for flow in flows["put"]), 1)
    made["batch_256_ms"] = milliseconds(flows["take"], 0.5)
    if "paced" in flows:
        made["put_p50_ms"] = milliseconds(flows["paced"], 0.5)
        made["put_p99_ms"] = milliseconds(flows["paced"], 0.99)
    if "raw_redis" in flows:
        made["vs_raw_redis"] = ratio(flows["put"], flows["raw_redis"])
    if "atropos_put" in flows:
        ways = zip(flows["atropos_put"], flows["atropos_compressed_put"], strict=True)
        best = [max(plain, compressed, key=lambda flow: flow.per_second) for plain, compressed in ways]
        made["atropos_batch_256_ms"] = milliseconds(flows["atropos_take"], 0.5)
        made["vs_atropos"] = through_ratio((flows["put"], flows["take"]), (best, flows["atropos_take"]))
        made["vs_atropos_put"] = ratio(flows["put"], best)
        made["vs_atropos_take"] = ratio(flows["take"], flows["atropos_take"])
        made["vs_atropos_cpu"] = cpu_ratio(flows["put"], best)
    return made | {f"{name}_cpu_s_per_thousand": cpu_per_thousand(some) for name, some in flows.items()}


def milliseconds(rounds: Sequence[Flow], share: float) -> float:
    """The median over the rounds of one quantile of their latencies."""
    return round(1000 * median(quantile(flow.latencies, share) for flow in rounds), 2)


def ratio(ours: Sequence[Flow], theirs: Sequence[Flow]) -> float:
    """The median over the rounds of how much faster ours are."""
    return round(median(our.per_second / their.per_second for our, their in zip(ours, theirs, strict=True)), 3)


def through_ratio(ours: tuple[Rounds, Rounds], theirs: tuple[Rounds, Rounds]) -> float:
    """The median over the rounds of how much sooner a sample is in and out again."""

    def seconds(put: Flow, take: Flow) -> float:
        return 1 / put.per_second + 1 / take.per_second

    our, their = ([seconds(*flows) for flows in zip(*some, strict=True)] for some in (ours, theirs))
    return round(median(b / a for a, b in zip(our, their, strict=True)), 3)


def cpu_ratio(ours: Sequence[Flow], theirs: Sequence[Flow]) -> float:
    """The median over the rounds of how much less CPU time our servers need. A busy machine changes it little."""

    def spent(flow: Flow) -> float:
        return sum(seconds for name, seconds in flow.cpu.items() if name != "client") / flow.samples

    return round(median(spent(their) / spent(our) for our, their in zip(ours, theirs, strict=True)), 2)


def cpu_per_thousand(flows: Sequence[Flow]) -> dict[str, float]:
    """CPU seconds of each process for a thousand samples."""
    return {name: round(median(1000 * flow.cpu[name] / flow.samples for flow in flows), 4) for name in flows[0].cpu}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(figures: Mapping[str, object]) -> str:
    """One figure a line."""
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {_text(value)}" for name, value in figures.items())


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {part}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int | float) else str(value)
