"""What came of it: one JSON object, and a table for people."""

from collections.abc import Sequence
from statistics import median

from load_tests.killing.audit import KINDS, Finding, totals
from load_tests.killing.chaos import Kill
from load_tests.killing.evidence import Evidence
from load_tests.killing.farm import SERVICES

Figures = dict[str, object]

SHOWN = 8
"""Findings of each kind that the table shows."""


def figures(kills: Sequence[Kill], findings: list[Finding], evidence: Evidence, crashes: int, failure: str) -> Figures:
    """Counts and seconds."""
    by_service = {name: [kill.seconds for kill in kills if kill.service == name] for name in SERVICES}
    return {
        "benchmark": "kill",
        "kills": len(kills),
        **totals(findings),
        "crashes": crashes,
        **_recovery([kill.seconds for kill in kills]),
        "services": {name: {"kills": len(s), **_recovery(s)} for name, s in by_service.items()},
        "steps": evidence.committed(),
        "accepted": len({accepted.sample.trajectory_id for accepted in evidence.accepted}),
        "dropped": len(evidence.drops),
        "redelivered_batches": sum(delivery.redelivered for delivery in evidence.deliveries),
        "failure": failure.partition("\n")[0],
    }


def _recovery(seconds: list[float]) -> dict[str, float | None]:
    return {
        "recovery_p50_s": round(median(seconds), 2) if seconds else None,
        "recovery_max_s": round(max(seconds), 2) if seconds else None,
    }


def table(result: Figures, findings: list[Finding]) -> str:
    """One figure a line, then what is wrong."""
    lines = [f"{name:<20}{value}" for name, value in result.items() if not isinstance(value, dict)]
    services = result["services"]
    assert isinstance(services, dict)
    lines += [
        f"{'':<2}{name:<18}{' '.join(f'{key} {value}' for key, value in each.items())}"
        for name, each in services.items()
    ]
    for kind in KINDS:
        found = [f"{kind.upper()} {finding.count}: {finding.what}" for finding in findings if finding.kind == kind]
        lines += [*found[:SHOWN], *([f"... and {len(found) - SHOWN} findings more"] if len(found) > SHOWN else [])]
    return "\n".join(lines)
