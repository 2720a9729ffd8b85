"""What a run came to: one record for machines (summary.json, the last line on stdout) and a few lines for people."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollfarm.up.console import clock_text, number_text, sparkline
from rollfarm.up.watch import Picture
from rollfarm.v1 import trainer_pb2

FILE = "summary.json"
REWARD = "reward"
"""The measure that every environment has."""


class Ending(StrEnum):
    """Why the farm was drained."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    TIME_LIMIT = "time limit"
    FAILED = "failed"


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    metric: str
    """What reward_before and reward_after measure."""
    reward_before: float | None
    """The measure at the first validation; unset where nothing was validated, or where that was not measured."""
    reward_after: float | None
    """The measure at the last."""
    steps: int
    samples: int
    """Trajectories in committed steps."""
    max_staleness: int
    policy_version: int
    wall_s: float
    """Of this command alone, starting and draining included."""
    waiting_s: float
    """The trainer waited for batches, over the whole run; likewise the next two."""
    training_s: float
    publishing_s: float
    tokens: int
    """Generated while this command ran."""
    tokens_per_s: float
    """Over the time from the first step on."""
    restarts: int
    resumed: bool
    run: str
    """The run's folder."""
    ending: Ending
    finished: bool
    """Whether every step is done. Otherwise the run can go on."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    dropped_groups: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    """Trajectories by lag when taken."""

    @property
    def gain(self) -> float | None:
        """How far the measure rose."""
        if self.reward_before is None or self.reward_after is None:
            return None
        return self.reward_after - self.reward_before

    def missed(self, min_gain: float) -> str:
        """Why a finished run falls short of `min_gain`; empty where it does not, or where 0 asks for nothing."""
        if not self.finished or min_gain == 0 or (self.gain is not None and self.gain >= min_gain):
            return ""
        if self.gain is None:
            return f"up.min_gain asks for a rise by {min_gain:g}, and the {self.metric} was {self.why_not_measured()}."
        return f"The {self.metric} did not rise by {min_gain:g}."

    def why_not_measured(self) -> str:
        """Why the rise is not known, in words."""
        if not self.validations:
            why = "trainer.validation_episodes is 0, or its log says that validating took too long"
            return f"not validated ({why})" if self.finished else "not validated yet"
        if self.reward_before is not None and len(self.validations) == 1:
            return "not validated after"
        known = {name for validation in self.validations for name in validation} - {"step", "episodes"}
        return f"not measured; known: {', '.join(sorted(known))}"

    def line(self) -> str:
        """One JSON object without the long lists."""
        long = {"rewards", "validations", "dropped_groups", "outcomes", "staleness"}
        return json.dumps({key: value for key, value in self.to_dict().items() if key not in long})

    def to_dict(self) -> dict[str, Any]:
        """Everything, rounded for reading."""
        return {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in dataclasses.asdict(self).items()
        }


def summarise(
    picture: Picture,
    ending: Ending,
    *,
    metric: str,
    wall_s: float,
    learning_s: float,
    restarts: int,
    resumed: bool,
    run: Path,
) -> Summary:
    """The summary of what the services last said."""
    validations = list(picture.progress.validations) if picture.progress else []
    measures = [measure(validation, metric) for validation in validations]
    steps = picture.steps.values()
    buffer = picture.buffer
    return Summary(
        metric=metric,
        reward_before=measures[0] if measures else None,
        reward_after=measures[-1] if len(measures) > 1 else None,
        steps=picture.progress.step_count if picture.progress else 0,
        samples=buffer.committed_trajectory_count if buffer else 0,
        max_staleness=buffer.max_staleness if buffer else 0,
        policy_version=buffer.policy_version if buffer else 0,
        wall_s=wall_s,
        waiting_s=_seconds(step.wait_duration for step in steps),
        training_s=_seconds(step.train_duration for step in steps),
        publishing_s=_seconds(step.publish_duration for step in steps),
        tokens=picture.tokens.total,
        tokens_per_s=picture.tokens.total / learning_s if learning_s > 0 else 0.0,
        restarts=restarts,
        resumed=resumed,
        run=str(run),
        ending=ending,
        finished=ending is Ending.FINISHED,
        rewards=picture.rewards(),
        validations=[_validation(validation) for validation in validations],
        dropped_groups=dict(buffer.dropped_group_counts) if buffer else {},
        outcomes=dict(buffer.outcome_counts) if buffer else {},
        staleness={str(lag): count for lag, count in sorted(buffer.staleness_counts.items())} if buffer else {},
    )


def measure(validation: trainer_pb2.Validation, metric: str) -> float | None:
    """The named measure of a validation; None where the environment does not measure that."""
    if metric in validation.metrics:
        return validation.metrics[metric]
    return validation.mean_reward if metric == REWARD else None


def finished_summary(run: Path) -> dict[str, Any] | None:
    """What the run came to, if it was finished."""
    try:
        summary = json.loads((run / FILE).read_text())
    except (OSError, ValueError):
        return None
    return summary if summary.get("finished") else None


def write(summary: Summary, run: Path) -> None:
    """Write RUN/summary.json in one move."""
    fresh = run / f"{FILE}.tmp"
    fresh.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    fresh.replace(run / FILE)


def lines(summary: Summary, min_gain: float) -> list[tuple[str, str]]:
    """The summary for people, as names and values."""
    busy = summary.waiting_s + summary.training_s + summary.publishing_s
    rows = [(summary.metric, _rise(summary, min_gain))]
    if len(summary.rewards) > 1:
        rows.append(("training reward", f"{sparkline(summary.rewards, 48)} {summary.rewards[-1]:.2f}"))
    rows += [
        ("steps", f"{summary.steps}, policy version {summary.policy_version}"),
        ("samples", f"{summary.samples}, at most {summary.max_staleness} versions old when trained on"),
        ("time", f"{clock_text(summary.wall_s)} in all; {_shares(summary, busy)}"),
        ("engines", f"{number_text(summary.tokens)} tokens, {number_text(summary.tokens_per_s)}/s"),
        ("restarts", str(summary.restarts) if summary.restarts else "none"),
        ("run", f"{summary.run} (report.html, curve.png, metrics.jsonl, config.toml, checkpoints)"),
    ]
    return rows


def _rise(summary: Summary, min_gain: float) -> str:
    before, after = summary.reward_before, summary.reward_after
    if before is None:
        return summary.why_not_measured()
    if after is None:
        return f"{before:.3f} before; {summary.why_not_measured()}"
    asked = ""
    if min_gain and summary.finished:
        asked = f", {'less than the' if summary.missed(min_gain) else 'at least'} {min_gain:g} asked for"
    return f"{before:.3f} before, {after:.3f} after ({after - before:+.3f}{asked})"


def _shares(summary: Summary, busy: float) -> str:
    if busy <= 0:
        return "no step was taken"
    parts = (("waiting", summary.waiting_s), ("training", summary.training_s), ("publishing", summary.publishing_s))
    return "trainer: " + ", ".join(f"{name} {seconds / busy:.0%}" for name, seconds in parts)


def _seconds(durations: Iterable[Any]) -> float:
    return sum(duration.ToMicroseconds() for duration in durations) / 1e6


def _validation(validation: trainer_pb2.Validation) -> dict[str, Any]:
    return {
        "step": validation.step_count,
        REWARD: validation.mean_reward,
        "episodes": validation.episode_count,
        **dict(validation.metrics),
    }
