"""Sample tables: a few trajectories of a batch as text, for people. samples.jsonl has them all."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol

from rollfarm.tokens import token_count, unpack_ids
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2


class Decoder(Protocol):
    """The part of a tokenizer that tables need."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, for people."""

    step: int
    """The step that was trained on it, from 0."""

    trajectory_id: str
    domain: str
    environment: str
    task: int
    """Its index in the domain."""

    reward: float
    reward_parts: Mapping[str, float]
    """Weighted; they sum to the reward."""

    metrics: Mapping[str, float]
    """What the environment measured."""

    outcome: str
    """OK or TRUNCATED."""

    policy_version: int
    """The oldest that sampled a token of it."""

    engine: str
    """The engines that generated it, in order of their first turn, with commas."""

    tokens: int
    """That the policy wrote."""

    text: str
    """Every token that the engines saw, decoded, special tokens included."""


def as_row(sample: Sample) -> dict[str, int | float | str]:
    """The sample for a table, whose cells are numbers and text."""
    return {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in asdict(sample).items()}


def choose(groups: Sequence[sample_buffer_pb2.Group], count: int) -> list[trajectory_pb2.Trajectory]:
    """At most `count` trajectories: the domains in turn, and of a domain each group before any twice. Never by reward,
    which would show the best or the worst for the usual."""
    by_domain: dict[str, list[sample_buffer_pb2.Group]] = {}
    for group in groups:
        by_domain.setdefault(domain_of(group), []).append(group)
    queues = [
        [each for row in zip_longest(*(group.trajectories for group in found)) for each in row if each is not None]
        for found in by_domain.values()
    ]
    return list(islice((each for row in zip_longest(*queues) for each in row if each is not None), count))


def domain_of(group: sample_buffer_pb2.Group) -> str:
    """The group's domain."""
    return group.task.domain


def table_of(
    step: int, groups: Sequence[sample_buffer_pb2.Group], *, count: int, decoder: Decoder
) -> tuple[Sample, ...]:
    """The table of one step."""
    return tuple(_sample(step, trajectory, decoder) for trajectory in choose(groups, count))


def _sample(step: int, trajectory: trajectory_pb2.Trajectory, decoder: Decoder) -> Sample:
    acted = [turn for turn in trajectory.turns if turn.author == trajectory_pb2.AUTHOR_POLICY]
    engines = dict.fromkeys(turn.engine_id for turn in acted if turn.engine_id)
    return Sample(
        step=step,
        trajectory_id=trajectory.trajectory_id,
        domain=trajectory.task.domain,
        environment=trajectory.task.environment,
        task=trajectory.task.index,
        reward=trajectory.reward,
        reward_parts={part.name: part.weight * part.value for part in trajectory.reward_parts},
        metrics=dict(trajectory.metrics),
        outcome=trajectory_pb2.Outcome.Name(trajectory.outcome).removeprefix("OUTCOME_"),
        policy_version=trajectory.oldest_policy_version,
        engine=",".join(engines),
        tokens=sum(token_count(turn.token_ids) for turn in acted),
        text="".join(decoder.decode(ids) for ids in _segments(trajectory)),
    )


def _segments(trajectory: trajectory_pb2.Trajectory) -> list[list[int]]:
    """The tokens of each segment: decoded together, for a word may be cut between two turns."""
    segments: list[list[int]] = []
    for turn in trajectory.turns:
        if turn.begins_segment or not segments:
            segments.append([])
        segments[-1].extend(unpack_ids(turn.token_ids).tolist())
    return segments


class SampleFile:
    """samples.jsonl: one line for each sample. A resumed run cuts it back to its checkpoint."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def append(self, samples: Sequence[Sample]) -> None:
        if samples:
            with self._file.open("a") as file:
                file.write("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))

    def cut(self, step_count: int) -> None:
        """Keep the samples of the first `step_count` steps alone."""
        if not self._file.is_file():
            return
        kept = [line for line in self._file.read_text().splitlines() if _step(line) < step_count]
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self._file)


def _step(line: str) -> float:
    """A line that a crash cut short belongs to no step that was kept."""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return float("inf")
    return found["step"]
