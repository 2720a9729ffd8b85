"""How far the run is: the one place that GetProgress, metrics.jsonl and /metrics read from.

metrics.jsonl has a line for each step and each validation. A resumed run cuts it back to its checkpoint, so that no
step is ever told twice.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import structlog

from rollfarm import times
from rollfarm.service import Changed
from rollfarm.v1 import sample_buffer_pb2, trainer_pb2
from trainer.disk import remedy
from trainer.sample_table import Sample, SampleFile
from trainer.trackers.feed import Entry, Feed, Kind

log = structlog.get_logger()

STEPS = prometheus_client.Gauge("rollfarm_trainer_steps_count", "Steps done.")
VERSION = prometheus_client.Gauge("rollfarm_trainer_policy_version", "The newest published version.")
REWARD = prometheus_client.Gauge("rollfarm_trainer_mean_reward", "Mean reward of the last batch.")
LAST = prometheus_client.Gauge("rollfarm_trainer_last_step_value", "What the last step measured, by name.", ["name"])
VALIDATION = prometheus_client.Gauge("rollfarm_trainer_validation_mean_reward", "Mean reward of the last validation.")
SECONDS = prometheus_client.Counter("rollfarm_trainer_step_seconds", "Where the time goes.", ["part"])
TOKENS = prometheus_client.Counter("rollfarm_trainer_tokens_count", "Policy tokens trained on.")
SKIPPED = prometheus_client.Counter("rollfarm_trainer_skipped_steps_count", "Steps that were not finite.")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step measured."""

    step: int
    mean_reward: float | None
    """None where nothing was rewarded, as in training on records; so it is of a validation."""

    metrics: Mapping[str, float]
    wait_seconds: float
    train_seconds: float
    publish_seconds: float
    policy_version: int
    time: float
    """Seconds since 1970 when it was done."""

    def to_entry(self) -> Entry:
        """As trackers are told. What is not of a part of the run or of the batch is the step's."""
        of_step = {**_rewarded(self), "policy_version": float(self.policy_version), **self.metrics}
        metrics = {name if "/" in name else f"train/{name}": value for name, value in of_step.items()}
        seconds = {f"time/{part}_seconds": getattr(self, f"{part}_seconds") for part in ("wait", "train", "publish")}
        return Entry(self.step + 1, Kind.STEP, self.time, metrics | seconds)

    def to_proto(self) -> trainer_pb2.StepMetrics:
        return trainer_pb2.StepMetrics(
            step=self.step,
            mean_reward=self.mean_reward or 0.0,
            metrics=self.metrics,
            wait_duration=times.duration(self.wait_seconds),
            train_duration=times.duration(self.train_seconds),
            publish_duration=times.duration(self.publish_seconds),
        )


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What one validation measured."""

    step_count: int
    mean_reward: float | None
    metrics: Mapping[str, float]
    episode_count: int
    policy_version: int
    time: float
    """Seconds since 1970 when it was done."""

    @classmethod
    def over(cls, results: Sequence[sample_buffer_pb2.DomainResult], step: int, version: int) -> "ValidationReport":
        """Of all domains, each episode counting alike; done now."""
        scored = [result for result in results if result.episode_count]
        names = sorted({name for result in scored for name in result.mean_metrics})
        overall = {
            name: _mean((each.mean_metrics[name], each.episode_count) for each in scored if name in each.mean_metrics)
            for name in names
        }
        by_domain = {
            f"domain/{each.domain}/{name}": value
            for each in scored
            for name, value in {"reward": each.mean_reward, **each.mean_metrics}.items()
        }
        return cls(
            step_count=step,
            mean_reward=_mean((result.mean_reward, result.episode_count) for result in scored),
            metrics=overall | by_domain,
            episode_count=sum(result.episode_count for result in scored),
            policy_version=version,
            time=time.time(),
        )

    def to_entry(self) -> Entry:
        """As trackers are told."""
        measured = {**_rewarded(self), "episodes": float(self.episode_count), **self.metrics}
        metrics = {f"validation/{name}": value for name, value in measured.items()}
        return Entry(self.step_count, Kind.VALIDATION, self.time, metrics)

    def to_proto(self) -> trainer_pb2.Validation:
        return trainer_pb2.Validation(
            step_count=self.step_count,
            mean_reward=self.mean_reward or 0.0,
            metrics=self.metrics,
            episode_count=self.episode_count,
        )


class Progress:
    """The run so far. Every change wakes `changed`."""

    def __init__(self, run_id: str, total_steps: int, file: Path, feeds: Sequence[Feed] = ()) -> None:
        """`file` is metrics.jsonl; samples.jsonl lies beside it. `feeds` start as the run is resumed."""
        self.run_id = run_id
        self.total_steps = total_steps
        self.phase: trainer_pb2.Phase.ValueType = trainer_pb2.PHASE_LOADING
        self.step_count = 0
        self.policy_version = 0
        self.checkpoint_path = ""
        self.steps: list[StepReport] = []
        self.validations: list[ValidationReport] = []
        self.changed = Changed()
        self._file = file
        self._samples = SampleFile(file.with_name("samples.jsonl"))
        self._feeds = feeds
        self._early: list[ValidationReport] = []
        """Validations after steps that are being repeated."""
        self._behind = False
        """Whether the file lacks something."""

    def resume(self, step_count: int, *, validated_until: int = 0) -> None:
        """Take up what metrics.jsonl tells of the first `step_count` steps, and cut the rest off; but for validations
        of up to `validated_until` steps, which are not repeated."""
        self.step_count = step_count
        self.steps, self.validations = [], []
        for line in self._lines():
            kind = line.pop("kind")
            if kind == "step" and line["step"] < step_count:
                self.steps.append(StepReport(**line))
            elif kind == "validation" and line["step_count"] <= max(step_count, validated_until):
                self.validations.append(ValidationReport(**line))
        self._try(self._rewrite)
        self._try(partial(self._samples.cut, step_count))
        known = [report for report in self.validations if report.step_count <= step_count]
        self._early = [report for report in self.validations if report.step_count > step_count]
        history = sorted((report.to_entry() for report in (*self.steps, *known)), key=lambda entry: entry.position)
        for feed in self._feeds:
            feed.start(history)
        self.changed.notify()

    def enter(self, phase: trainer_pb2.Phase.ValueType) -> None:
        self.phase = phase
        self.changed.notify()

    def published(self, version: int) -> None:
        self.policy_version = version
        VERSION.set(version)
        self.changed.notify()

    def stepped(self, report: StepReport, samples: Sequence[Sample] = ()) -> None:
        self.steps.append(report)
        self.step_count = report.step + 1
        self._append(report)
        self._tell(report.to_entry())
        if samples:
            self._show(samples, report.time)
        for early in self._early:
            if early.step_count == self.step_count:
                self._tell(early.to_entry())
        STEPS.set(self.step_count)
        if report.mean_reward is not None:
            REWARD.set(report.mean_reward)
        for name, value in report.metrics.items():
            LAST.labels(name).set(value)
        for part in ("wait", "train", "publish"):
            SECONDS.labels(part).inc(getattr(report, f"{part}_seconds"))
        TOKENS.inc(report.metrics.get("tokens", 0.0))
        SKIPPED.inc(report.metrics.get("skipped", 0.0))
        self.changed.notify()

    def validated(self, report: ValidationReport) -> None:
        self.validations.append(report)
        self._append(report)
        self._tell(report.to_entry())
        if report.mean_reward is not None:
            VALIDATION.set(report.mean_reward)
        self.changed.notify()

    def _show(self, samples: Sequence[Sample], time: float) -> None:
        try:
            self._samples.append(samples)
        except OSError as error:
            log.error("samples.jsonl not written", cause=str(error), remedy=remedy(error))
        self._tell(Entry(self.step_count, Kind.SAMPLES, time, {}, samples))

    def _tell(self, entry: Entry) -> None:
        for feed in self._feeds:
            feed.offer(entry)

    def has_validation(self, step_count: int) -> bool:
        """Whether a validation was measured after that many steps."""
        return any(report.step_count == step_count for report in self.validations)

    def to_proto(self, from_step: int | None) -> trainer_pb2.GetProgressResponse:
        steps = self.steps[-1:] if from_step is None else [each for each in self.steps if each.step >= from_step]
        return trainer_pb2.GetProgressResponse(
            run_id=self.run_id,
            phase=self.phase,
            step_count=self.step_count,
            total_step_count=self.total_steps,
            policy_version=self.policy_version,
            steps=[each.to_proto() for each in steps],
            validations=[each.to_proto() for each in self.validations],
            checkpoint_path=self.checkpoint_path,
        )

    def _lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        if self._file.is_file():
            for text in self._file.read_text().splitlines():
                try:
                    lines.append(json.loads(text))
                except ValueError:
                    break  # A crash cut the last line short.
        return lines

    def _rewrite(self) -> None:
        """Write what is kept, in the order in which it was measured."""
        kept = sorted([*self.steps, *self.validations], key=lambda report: report.time)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(map(_line, kept)))
        partial.replace(self._file)

    def catch_up(self) -> None:
        """Write what there was no room for."""
        if self._behind:
            self._try(self._rewrite)

    def _append(self, report: StepReport | ValidationReport) -> None:
        def append() -> None:
            with self._file.open("a") as file:
                file.write(_line(report))

        self._try(self._rewrite if self._behind else append)

    def _try(self, write: Callable[[], None]) -> None:
        """Write, if there is room. A run does not end for want of a line."""
        try:
            write()
        except OSError as error:
            log.error(
                "the run's records not written", folder=str(self._file.parent), cause=str(error), remedy=remedy(error)
            )
            self._behind = True
        else:
            self._behind = False


def _mean(values: Iterable[tuple[float, int]]) -> float:
    """Of values that count so many times; 0 of none."""
    pairs = list(values)
    return sum(value * count for value, count in pairs) / max(1, sum(count for _, count in pairs))


def _rewarded(report: StepReport | ValidationReport) -> dict[str, float]:
    return {} if report.mean_reward is None else {"reward": report.mean_reward}


def _line(report: StepReport | ValidationReport) -> str:
    kind = "step" if isinstance(report, StepReport) else "validation"
    return json.dumps({"kind": kind, **asdict(report)}) + "\n"
