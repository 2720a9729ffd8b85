"""Holds every injection against what the farm made of it, by the trace of its episode. Pure: no clock, no process.

An injected episode either failed as it should, in env_manager's log, or was cancelled before it could. Of those that
failed, sample_buffer counted each, except where it had cancelled the lease a moment before. So nothing is off by a
number: what is off is off by named episodes, and any other is a fault.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from load_tests.failing.injections import OUTCOMES, Injection

NAMES = ("OUTCOME_ENV_FAILED", "OUTCOME_REWARD_FAILED")
"""Outcomes that are injected."""

ENDED = ("OUTCOME_OK", "OUTCOME_TRUNCATED", "OUTCOME_ENV_FAILED", "OUTCOME_REWARD_FAILED", "OUTCOME_ABORTED")
"""Outcomes of episodes that nobody cancelled."""


@dataclass
class Told:
    """What env_manager's log tells, by trace."""

    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Outcomes of episodes that failed."""

    causes: dict[str, str] = field(default_factory=dict[str, str])
    """Why they did."""

    late: set[str] = field(default_factory=set[str])
    """Episodes whose end sample_buffer did not want to know any more."""

    cancelled: set[str] = field(default_factory=set[str])
    """Episodes that were cancelled while they were played or scored."""

    suspensions: int = 0
    """How often the environment was left alone."""


@dataclass
class Account:
    """Of one run."""

    injected: Counter[str]
    """By kind."""

    counted: dict[str, int]
    """By outcome, as sample_buffer says."""

    cancelled: Counter[str]
    """Injected and then cancelled, before it could fail: by outcome that it would have had."""

    late: Counter[str]
    """Injected and failed, when sample_buffer had cancelled the lease: by outcome."""

    not_injected: Counter[str]
    """Failed, and nothing was injected: by outcome. On a machine that stands still for seconds, episodes do that."""

    suspensions: int
    """How often the environment was left alone."""

    faults: list[str]
    """What does not add up, in words. Empty where every injection and every failure is accounted for."""

    @property
    def injected_by_outcome(self) -> Counter[str]:
        """What the injected episodes had to end as."""
        return Counter(
            {name: sum(self.injected[kind] for kind in OUTCOMES if OUTCOMES[kind] == name) for name in NAMES}
        )

    @property
    def failed_share(self) -> float:
        """Of the episodes that came to an end: those that failed."""
        ended = sum(self.counted.get(name, 0) for name in ENDED)
        return 1 - sum(self.counted.get(name, 0) for name in ENDED[:2]) / ended if ended else 0.0


def read_log(lines: Iterable[str]) -> Told:
    """The log of one env_manager, as JSON lines."""
    told = Told()
    for line in lines:
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        trace = event.get("trace_id", "")
        match event["event"]:
            case "episode failed":
                told.failed[trace] = event["outcome"]
                told.causes[trace] = event["cause"]
            case "lease expired":
                told.late.add(trace)
            case "episode cancelled":
                told.cancelled.add(trace)
            case "environment suspended":
                told.suspensions += 1
            case _:
                pass
    return told


def account(injections: Sequence[Injection], told: Told, counted: Mapping[str, int]) -> Account:
    """What became of every injection, and where every failure came from."""
    meant = {injection.trace_id: OUTCOMES[injection.kind] for injection in injections}
    cancelled = {trace for trace in meant if trace in told.cancelled and trace not in told.failed}
    late = {trace for trace in told.failed if trace in told.late}
    return Account(
        injected=Counter(injection.kind for injection in injections),
        counted=dict(counted),
        cancelled=Counter(meant[trace] for trace in cancelled),
        late=Counter(told.failed[trace] for trace in late),
        not_injected=Counter(outcome for trace, outcome in told.failed.items() if trace not in meant),
        suspensions=told.suspensions,
        faults=[*_faults(meant, len(injections), told, cancelled), *_miscounts(told, late, counted)],
    )


def _faults(meant: Mapping[str, str], count: int, told: Told, cancelled: set[str]) -> Iterable[str]:
    if count != len(meant):
        yield f"{count - len(meant)} episodes were injected into twice"
    for trace, outcome in meant.items():
        if trace not in told.failed and trace not in cancelled:
            yield f"{trace}: {outcome} was injected, and it neither failed nor was cancelled"
        elif told.failed.get(trace, outcome) != outcome:
            yield f"{trace}: {outcome} was injected, and it ended as {told.failed[trace]}: {told.causes[trace]}"
    for trace, outcome in told.failed.items():
        if trace not in meant:
            yield f"{trace}: {outcome}, and nothing was injected: {told.causes[trace]}"


def _miscounts(told: Told, late: set[str], counted: Mapping[str, int]) -> Iterable[str]:
    for name in NAMES:
        expected = sum(outcome == name and trace not in late for trace, outcome in told.failed.items())
        if counted.get(name, 0) != expected:
            yield f"sample_buffer counted {counted.get(name, 0)} of {name}, and env_manager told it of {expected}"
