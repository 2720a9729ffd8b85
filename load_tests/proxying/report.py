"""Figures from what was measured: medians over the rounds, as one JSON object."""

from collections.abc import Mapping, Sequence
from statistics import median

from load_tests.buffering.report import Figures, quantile
from load_tests.proxying.flow import Flow

Rounds = Sequence[Flow]
"""One flow for each round."""

Measured = Mapping[str, Mapping[str, Rounds]]
"""By system and measure."""

HELD = (1000, 4000, 16000)
"""Requests held open at once."""

ENGINE_SECONDS = 1.0
"""What the engine takes that they are held open on."""

LATENCIES = {"open": "added", "paced": "added_paced", "closed": "added_closed"}
"""The figures' names by measure."""


def figures(measured: Measured, peers: Sequence[str]) -> Figures:
    """Every figure; None where it was not measured."""
    made = _system(measured, "llm_proxy", "direct", "")
    made["added_p50_floor_ms"] = added_ms(measured, "relay", "direct", "open", 0.5)
    made["added_p99_floor_ms"] = added_ms(measured, "relay", "direct", "open", 0.99)
    made["cpu_us_stream"] = cpu_us(measured, "llm_proxy", "closed")
    made["cpu_us_stream_paced"] = cpu_us(measured, "llm_proxy", "paced")
    made["cpu_us_unary"] = cpu_us(measured, "unary", "closed")
    made["cpu_us_unary_floor"] = cpu_us(measured, "unary_floor", "closed")
    made["cpu_us_http"] = cpu_us(measured, "http", "closed")
    made["unary_per_s"] = per_second(measured, "unary")
    made["http_per_s"] = per_second(measured, "http")
    for name, prefix in (("direct", "direct_"), ("direct_http", "direct_http_")):
        made[f"{prefix}per_s"] = per_second(measured, name)
        made |= {f"{prefix}held_ratio_{count}": held_ratio(measured, name, count) for count in HELD}
    for peer in peers:
        made |= _system(measured, peer, "direct_http", f"peer_{peer}_")
        made[f"peer_{peer}_cpu_us"] = cpu_us(measured, peer, "closed")
        made[f"peer_{peer}_cpu_us_paced"] = cpu_us(measured, peer, "paced")
    return made


def _system(measured: Measured, name: str, direct: str, prefix: str) -> Figures:
    made: Figures = {}
    for measure, key in LATENCIES.items():
        made[f"{prefix}{key}_p50_ms"] = added_ms(measured, name, direct, measure, 0.5)
        made[f"{prefix}{key}_p99_ms"] = added_ms(measured, name, direct, measure, 0.99)
    made |= {f"{prefix}held_ratio_{count}": held_ratio(measured, name, count) for count in HELD}
    made[f"{prefix}rss_kb_per_open_request"] = rss_kb(measured, name)
    made[f"{prefix}per_s"] = per_second(measured, name)
    return made


def added_ms(measured: Measured, name: str, direct: str, measure: str, share: float) -> float | None:
    """The median over the rounds of how much later the quantile of its latencies is than the engine's alone."""
    ours, alone = rounds(measured, name, measure), rounds(measured, direct, measure)
    if not ours or not alone:
        return None
    pairs = zip(ours, alone, strict=True)
    return round(1000 * median(quantile(a.latencies, share) - quantile(b.latencies, share) for a, b in pairs), 3)


def cpu_us(measured: Measured, name: str, measure: str) -> float | None:
    """CPU time of its process for a request."""
    flows = rounds(measured, name, measure)
    return round(median(flow.cpu_us for flow in flows), 1) if flows else None


def per_second(measured: Measured, name: str) -> int | None:
    """Requests a second in the closed loop."""
    flows = rounds(measured, name, "closed")
    return round(median(flow.requests / flow.seconds for flow in flows)) if flows else None


def held_ratio(measured: Measured, name: str, count: int) -> float | None:
    """The time from the first request sent to the last answer, against the engine's own second."""
    flows = rounds(measured, name, f"held_{count}")
    return round(median(flow.seconds for flow in flows) / ENGINE_SECONDS, 3) if flows else None


def rss_kb(measured: Measured, name: str) -> float | None:
    """What the process grows by for each request that is open, when most of them are."""
    for count in reversed(HELD):
        if flows := rounds(measured, name, f"held_{count}"):
            return round(median(flow.rss_bytes / flow.requests for flow in flows) / 1e3, 2)
    return None


def line(flow: Flow) -> str:
    """One measurement, for people."""
    p50, p99 = (1000 * quantile(flow.latencies, share) for share in (0.5, 0.99))
    return f"{flow.requests:,} in {flow.seconds:.2f} s, p50 {p50:,.2f} ms, p99 {p99:,.2f} ms, CPU {flow.cpu_us:,.0f} us"


def rounds(measured: Measured, name: str, measure: str) -> Rounds:
    """One flow for each round; none if it was not measured."""
    return measured.get(name, {}).get(measure, ())
