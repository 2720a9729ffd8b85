"""What an evaluation found: a line for each task in tasks.jsonl, and what they come to in evaluation.json."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollfarm.config import ConfigError, nearest
from rollfarm.v1 import sample_buffer_pb2
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.estimates import LEVEL, Estimate, over_tasks, pass_at_k

TASKS, RESULT = "tasks.jsonl", "evaluation.json"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The episodes of one task."""

    step: int
    """The delivery that it came with."""

    domain: str
    task: int
    """Its index in the domain."""

    group_id: str
    values: Sequence[float]
    """Each episode's metric."""

    rewards: Sequence[float]


def task_result(step: int, group: sample_buffer_pb2.Group, metric: str) -> TaskResult:
    """One group's result. Raises ConfigError where its episodes were not measured so."""
    rewards = [each.reward for each in group.trajectories]
    known = sorted({name for each in group.trajectories for name in each.metrics})
    if metric != "reward" and any(metric not in each.metrics for each in group.trajectories):
        raise ConfigError(
            f"trainer.evaluation.metric: the domain {group.task.domain!r} does not measure {metric!r}."
            f"{nearest(metric, ['reward', *known])}"
        )
    values = rewards if metric == "reward" else [each.metrics[metric] for each in group.trajectories]
    return TaskResult(step, group.task.domain, group.task.index, group.group_id, values, rewards)


class Results:
    """tasks.jsonl."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.tasks: list[TaskResult] = []

    def resume(self, step_count: int) -> None:
        """Take up what was found in the first `step_count` deliveries, and cut the rest off: it comes again. Raises
        ConfigError where something is missing."""
        lines = self._file.read_text().splitlines() if self._file.is_file() else []
        kept: list[TaskResult] = []
        for line in lines:
            try:
                kept.append(TaskResult(**json.loads(line)))
            except (ValueError, TypeError):
                break  # A crash cut the last line short.
        self.tasks = [task for task in kept if task.step < step_count]
        if {task.step for task in self.tasks} != set(range(step_count)):
            raise ConfigError(
                f"{self._file}: results are missing of the {step_count} deliveries that sample_buffer has committed. "
                "Restore the file, or begin anew with --up.fresh true."
            )
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(map(_line, self.tasks)))
        partial.replace(self._file)

    def add(self, tasks: Sequence[TaskResult]) -> None:
        """Durable when this returns."""
        with self._file.open("a") as file:
            file.write("".join(map(_line, tasks)))
            file.flush()
            os.fsync(file.fileno())
        self.tasks.extend(tasks)


def summarise(
    tasks: Sequence[TaskResult], config: EvaluationConfig, *, model: str, dropped: Mapping[str, int]
) -> dict[str, object]:
    """evaluation.json: each domain, and all tasks together. `dropped` are groups that others replaced, by reason."""
    domains = sorted({task.domain for task in tasks})
    parts = {domain: [task for task in tasks if task.domain == domain] for domain in domains}
    return {
        "model": model,
        "metric": config.metric,
        "threshold": config.threshold,
        "samples_per_task": config.samples,
        "confidence": LEVEL,
        "interval": "mean of tasks +- 1.96 sqrt(sum (m_t - m)^2 / (T (T - 1))), clustered by task",
        "dropped_groups": dict(dropped),
        "domains": {domain: _measures(part, config) for domain, part in parts.items()},
        "all": _measures(tasks, config),
    }


def _measures(tasks: Sequence[TaskResult], config: EvaluationConfig) -> dict[str, object]:
    passed = [sum(value >= config.threshold for value in task.values) for task in tasks]
    sizes = [len(task.values) for task in tasks]
    means = [sum(task.values) / len(task.values) for task in tasks]
    found: dict[str, Estimate] = {f"avg@{config.samples}": over_tasks(means)}
    for k in sorted(set(config.k)):
        rates = [pass_at_k(size, count, k) for size, count in zip(sizes, passed, strict=True)]
        found[f"pass@{k}"] = over_tasks(rates, lowest=0.0, highest=1.0)
    return {"tasks": len(tasks), "episodes": sum(sizes), **{name: asdict(each) for name, each in found.items()}}


def _line(task: TaskResult) -> str:
    return json.dumps(asdict(task)) + "\n"


def write(result: Mapping[str, object], folder: Path) -> None:
    """Write evaluation.json in one move."""
    partial = folder / f"{RESULT}.partial"
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(folder / RESULT)
