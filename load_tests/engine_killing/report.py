"""What came of it: one JSON object, and a table for people."""

from collections.abc import Iterator, Sequence
from statistics import median

from load_tests.engine_killing.audit import KINDS, Finding, totals
from load_tests.engine_killing.chaos import Blow
from load_tests.engine_killing.evidence import Evidence

Figures = dict[str, object]

SHOWN = 8
"""Findings of each kind that the table shows."""


def figures(blows: Sequence[Blow], findings: list[Finding], evidence: Evidence, failure: str) -> Figures:
    """Counts and seconds."""
    kills = [blow for blow in blows if blow.kind == "kill"]
    hangs = [blow for blow in blows if blow.kind == "hang"]
    answers = [answer for answer in evidence.answers if not answer.refusal]
    return {
        "benchmark": "engine_kill",
        **totals(findings),
        **_summary("recovery", [blow.recovery_seconds for blow in kills]),
        **_summary("victims", [each for blow in kills for each in went_on(evidence, blow)]),
        **_summary("hang_recovery", [blow.recovery_seconds for blow in hangs]),
        **_summary("hang_victims", [each for blow in hangs for each in went_on(evidence, blow)]),
        "kills": len(kills),
        "hangs": len(hangs),
        "victims": sum(len(blow.victims) for blow in kills),
        "requests": len(evidence.asked),
        "refused": len(evidence.answers) - len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "resumptions": sum(answer.resumptions for answer in answers),
        "updates": sum(update.committed_at is not None for update in evidence.updates),
        "mixed_versions": sum(len(answer.spans) > 1 for answer in answers),
        "failure": failure.partition("\n")[0],
    }


def went_on(evidence: Evidence, blow: Blow) -> Iterator[float]:
    """Seconds from the blow until each victim had new tokens, from whichever engine, or its answer."""
    first: dict[str, float] = {}
    for progress in evidence.progress_after(blow.at):
        first.setdefault(progress.attempt.request_id, progress.at)
    for answer in evidence.answers:
        if answer.at > blow.at:
            first[answer.request_id] = min(answer.at, first.get(answer.request_id, answer.at))
    return (first[request_id] - blow.at for request_id in blow.victims if request_id in first)


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_p50_s": round(median(seconds), 3) if seconds else None,
        f"{name}_max_s": round(max(seconds), 3) if seconds else None,
    }


def table(result: Figures, findings: list[Finding]) -> str:
    """One figure a line, then what is wrong."""
    lines = [f"{name:<20}{value}" for name, value in result.items()]
    for kind in KINDS:
        found = [f"{kind.upper()} {finding.count}: {finding.what}" for finding in findings if finding.kind == kind]
        lines += [*found[:SHOWN], *([f"... and {len(found) - SHOWN} findings more"] if len(found) > SHOWN else [])]
    return "\n".join(lines)
