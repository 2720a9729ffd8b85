"""Figures from what was measured: medians over the rounds, as one JSON object."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from load_tests.buffering.report import Figures
from load_tests.stepping.flow import LONG, SHORT, Flow, Order
from load_tests.stepping.holding import Held

Rounds = Sequence[Flow]
"""One flow for each round."""

Measured = Mapping[str, Mapping[str, Rounds]]
"""By transport and measure."""

TRANSPORTS = ("in_process", "grpc", "attached", "process", "openenv", "openenv_default")


def orders(sessions: int, seconds: float) -> dict[str, Order]:
    """The measures, by name."""
    return {
        "together": Order(sessions, SHORT, threads=False, seconds=seconds),
        "alone": Order(1, SHORT, threads=False, seconds=seconds),
        "long": Order(sessions, LONG, threads=False, seconds=seconds),
        "threads": Order(sessions, SHORT, threads=True, seconds=seconds),
    }


def figures(measured: Measured) -> Figures:
    """Every figure; None where it was not measured."""
    made: Figures = {}
    for peer in ("openenv", "openenv_default"):
        made[f"grpc_vs_{peer}"] = ratio(measured, peer, "together", faster)
        made[f"grpc_vs_{peer}_cpu"] = ratio(measured, peer, "together", cheaper)
        for measure in ("long", "threads", "alone"):
            made[f"grpc_vs_{peer}_{measure}"] = ratio(measured, peer, measure, faster)
    for measure, suffix in {"together": "", "long": "_long", "threads": "_threads", "alone": "_alone"}.items():
        made[f"steps_per_s{suffix}"] = _by_transport(measured, measure, lambda flow: flow.per_second)
        made[f"cpu_us_per_step{suffix}"] = _by_transport(measured, measure, lambda flow: flow.cpu_us)
    made["cpu_us_client"] = _by_transport(measured, "together", lambda flow: flow.client_us)
    made["cpu_us_server"] = _by_transport(measured, "together", lambda flow: flow.server_us)
    return made


def faster(ours: Flow, their: Flow) -> float:
    return ours.per_second / their.per_second


def cheaper(ours: Flow, their: Flow) -> float:
    return their.cpu_us / ours.cpu_us


def ratio(measured: Measured, peer: str, measure: str, of: Callable[[Flow, Flow], float]) -> float | None:
    """The median over the rounds of how much better gRPC did than the peer in the same round."""
    ours, theirs = rounds(measured, "grpc", measure), rounds(measured, peer, measure)
    if not ours or not theirs:
        return None
    return round(median(of(a, b) for a, b in zip(ours, theirs, strict=True)), 2)


def held_figures(local: Held, on_server: Held) -> Figures:
    """Of the episodes that slept. The names are of 10,000, however many there were."""
    return {
        "held_episodes": local.episodes,
        "held_10000_mb": round(local.mb),
        "held_kb_per_episode": _kb_per_episode(local),
        "held_gap_ms": round(local.gap_ms),
        "held_ramp_gap_ms": round(local.ramp_gap_ms),
        "held_ramp_s": round(local.ramp_seconds, 1),
        "held_handed_in": local.handed_in,
        "held_on_server_10000_mb": round(on_server.mb),
        "held_on_server_kb_per_episode": _kb_per_episode(on_server),
        "held_server_10000_mb": round(on_server.server_mb),
        "held_server_gap_ms": round(on_server.gap_ms),
        "held_on_server_handed_in": on_server.handed_in,
    }


def _kb_per_episode(held: Held) -> float:
    return round(1000 * (held.mb - held.empty_mb) / held.episodes, 1)


def _by_transport(measured: Measured, measure: str, of: Callable[[Flow], float]) -> dict[str, float | None]:
    return {
        transport: round(median(map(of, flows)), 1) if (flows := rounds(measured, transport, measure)) else None
        for transport in TRANSPORTS
    }


def line(flow: Flow) -> str:
    """One measurement, for people."""
    return (
        f"{flow.per_second:9,.0f} steps/s  CPU {flow.cpu_us:6.0f} us "
        f"(client {flow.client_us:.0f}, server {flow.server_us:.0f})"
    )


def rounds(measured: Measured, transport: str, measure: str) -> Rounds:
    """One flow for each round; none if it was not measured."""
    return measured.get(transport, {}).get(measure, ())
