"""Learning without a farm: groups in, metrics and weights out. Synchronous, and run in one thread.

The result of a step is a pure function of the weights, the batch and the configuration.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import structlog
import torch

from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from trainer import warm_start
from trainer.algorithms.measures import of_critic, readable
from trainer.algorithms.samples import Samples
from trainer.backends import Write
from trainer.backends.build import build_models
from trainer.batch_measures import measured
from trainer.checkpoints import LearnerState
from trainer.config import TrainerConfig, TrainerRoot
from trainer.judging import Judge
from trainer.objective import Target, ValueObjective, advantage_of, policy_objective, supervised_objective
from trainer.ranks import Leader, Role
from trainer.rows import Row, policy_token_count, rows_of
from trainer.sample_table import Decoder, Sample, table_of
from trainer.samples import check_images, check_vocabulary, refused, samples_of, was_truncated
from trainer.schedule import lr_share
from trainer.texts import Renderer
from trainer.vocabulary import vocabulary_of
from trainer.weights.memory import arena_for
from trainer.weights.snapshot import Adapter, Opened, Snapshot, Snapshots, read_adapter

log = structlog.get_logger()

POLICY, SUPERVISED, CRITIC = "policy", "supervised", "critic"

Trajectories = Sequence[trajectory_pb2.Trajectory]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step measured."""

    mean_reward: float
    """Of the batch's trajectories; 0 where it has none."""

    metrics: dict[str, float]
    """Finite values by name."""


def objectives(config: TrainerConfig) -> dict[str, Target]:
    """What ranks may be asked to minimise, by name."""
    known: dict[str, Target] = {POLICY: policy_objective(config), SUPERVISED: supervised_objective()}
    return known | ({CRITIC: ValueObjective(config.critic.clip)} if config.critic else {})


def build_learner(root: TrainerRoot) -> "Learner":
    """Rank 0's learner. Raises ConfigError."""
    known = objectives(root.trainer)
    leader = Leader(build_models(root.model, root.trainer), known)
    judge = Judge(leader, advantage_of(root.trainer), root.trainer, temperature=root.run.sampling.temperature)
    return Learner(leader, known, judge, root, vocabulary=vocabulary_of(root.model.path))


class Learner:
    """The policy as it is now, and how it learns from a batch."""

    def __init__(
        self, leader: Leader, known: Mapping[str, Target], judge: Judge, root: TrainerRoot, *, vocabulary: int
    ) -> None:
        self.leader = leader
        self._objectives = known
        self._judge = judge
        self._run = root.run
        self._model = root.model
        self._config = root.trainer
        self._vocabulary = vocabulary
        self._snapshots = Snapshots(
            dtype=getattr(torch, self._model.dtype),
            bucket_size_bytes=self._config.bucket_size_mb * 1024 * 1024,
            make_arena=arena_for(self._config.transport),
        )

    def learn(self, batch: sample_buffer_pb2.Batch, groups: Sequence[sample_buffer_pb2.Group]) -> Outcome:
        """One batch's optimiser steps. A group that cannot be learnt from is left out; a step that is not finite, or
        for which nothing is left, changes nothing and is counted. Raises ConfigError for another vocabulary, or images
        that the model sees otherwise."""
        check_vocabulary(groups, self._vocabulary)
        check_images(groups, self._model.path)
        causes = refused(groups)
        if causes:
            log.error("groups left out", step=batch.step, batch_id=batch.batch_id, causes=causes)
        sound = [group for group in groups if group.group_id not in causes]
        trajectories = [trajectory for group in sound for trajectory in group.trajectories]
        rows_of_each = [with_lag(rows_of(each), batch.policy_version) for each in trajectories]
        metrics = {"refused_groups": float(len(causes)), **measured(trajectories, rows_of_each)}
        if not any(map(policy_token_count, rows_of_each)):
            self._report_skip("the policy wrote nothing in it", batch, groups)
            return _outcome(trajectories, {**metrics, "skipped": 1.0, "tokens": 0.0})
        samples = self._samples(sound, batch.step)
        truncated_N = torch.tensor([was_truncated(each) for each in trajectories])
        judged = self._judge.judge(samples, [row for each in rows_of_each for row in each], truncated_N)
        metrics |= judged.metrics
        if not judged.rows:
            self._report_skip("trainer.shaping drops all of it", batch, groups)
            return _outcome(trajectories, {**metrics, "skipped": 1.0, "tokens": 0.0})
        metrics |= self._improve(judged.rows, batch.step)
        metrics["zero_advantage_share"] = fmean(not row.advantage_P.any() for row in judged.rows)
        if metrics["skipped"]:
            self._report_skip("loss or gradient is not finite", batch, groups)
        return _outcome(trajectories, metrics)

    def table(self, step: int, groups: Sequence[sample_buffer_pb2.Group]) -> tuple[Sample, ...]:
        """Some of the step's trajectories as text, where it is the turn of the step."""
        settings = self._config.samples
        if not settings.every or step % settings.every:
            return ()
        return table_of(step, groups, count=settings.count, decoder=self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Decoder:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model.path)

    def _improve(self, rows: Sequence[Row], step: int) -> dict[str, float]:
        """The optimiser steps of a batch, and what they measured on average."""
        count, critic = min(self._config.steps_per_batch, len(rows)), self._config.critic
        # Where nothing is to be learnt the step only measures: Adam's moments alone would move the weights.
        share = self.lr_share(step) if self._teaches(rows) else 0.0
        policy: list[dict[str, float]] = []
        critics: list[dict[str, float]] = []
        for part in [rows[index::count] for index in range(count)] * self._config.passes:
            if critic is not None:
                lr = critic.lr * self.lr_share(step)
                critics.append(of_critic(self._train(part, CRITIC, lr=lr, role=Role.CRITIC)))
            if critic is None or step >= critic.warmup_steps:
                policy.append(readable(self._train(part, POLICY, lr=self._config.lr * share)))
        waiting = {"skipped": 0.0, "tokens": float(policy_token_count(rows))}
        return {**together(critics), **(together(policy) or waiting)}

    def _train(self, rows: Sequence[Row], name: str, *, lr: float, role: Role = Role.POLICY) -> dict[str, float]:
        norm, temperature = self._objectives[name].norm(rows), self._run.sampling.temperature
        return self.leader.train_step(rows, name, temperature=temperature, norm=norm, lr=lr, role=role)

    def _teaches(self, rows: Sequence[Row]) -> bool:
        return bool(self._config.entropy_bonus or self._config.kl.loss or any(row.advantage_P.any() for row in rows))

    def _report_skip(
        self, cause: str, batch: sample_buffer_pb2.Batch, groups: Sequence[sample_buffer_pb2.Group]
    ) -> None:
        ids = [group.group_id for group in groups]
        log.error(f"step skipped: {cause}", step=batch.step, batch_id=batch.batch_id, group_ids=ids)

    def lr_share(self, step: int) -> float:
        """The learning rate of a step, from 0, as a share of its peak."""
        return lr_share(self._config, step, self._run.steps)

    def warm_start(self) -> Iterator[float]:
        """Supervised steps, one for each item: its loss. The optimiser is fresh afterwards."""
        settings = self._config.warm_start
        if settings.data is None or settings.steps == 0:
            return
        rows = warm_start.rows_of(Renderer(self._model.path), settings.data)
        chosen = warm_start.batches(rows, batch_size=settings.batch_size, steps=settings.steps, seed=self._config.seed)
        for step, batch in enumerate(chosen):
            lr = settings.lr * (1 - step / settings.steps)
            norm = self._objectives[SUPERVISED].norm(batch)
            found = self.leader.train_step(batch, SUPERVISED, temperature=1.0, norm=norm, lr=lr)
            yield found.get("loss", math.nan)
        self.leader.reset_optimizer()

    def snapshot(self, policy_version: int, opened: Opened = lambda snapshot: None) -> Snapshot:
        """A copy of the weights for engines, or of the adapter where it travels alone; `opened` gets it as soon as it
        may be sent."""
        if self._config.lora is not None and self._config.transport == "store":
            snapshot = self._snapshots.take_adapter(self._adapter(), policy_version=policy_version)
            opened(snapshot)
            return snapshot
        return self._snapshots.take(self.leader.named_tensors(), policy_version=policy_version, opened=opened)

    def _adapter(self) -> Adapter:
        with tempfile.TemporaryDirectory(prefix="rollfarm-adapter-") as folder:
            self.leader.export_adapter(Path(folder))
            return read_adapter(Path(folder))

    def save(self, folder: Path) -> Write:
        return self.leader.save(folder)

    def load(self, folder: Path) -> None:
        self.leader.load(folder)

    def state(self) -> LearnerState:
        """What is carried from step to step beside weights and optimiser."""
        return self._judge.state()

    def restore(self, state: LearnerState) -> None:
        """Go on from such a state."""
        self._judge.restore({name: value for name, value in state.items() if isinstance(value, (int, float))})

    def export(self, folder: Path) -> None:
        self.leader.export(folder)

    def _samples(self, groups: Sequence[sample_buffer_pb2.Group], step: int) -> Samples:
        samples = samples_of(groups)
        if not self._config.shuffle_scores:
            return samples
        dice = torch.Generator().manual_seed(hash((self._config.seed, step)) & 0x7FFFFFFF)
        dealt_N = samples.reward_N[torch.randperm(len(samples.reward_N), generator=dice)]
        return replace(samples, reward_N=dealt_N, step_reward_K=torch.zeros_like(samples.step_reward_K))


def with_lag(rows: Sequence[Row], policy_version: int) -> list[Row]:
    """The rows with their lag behind this version."""
    lags = [policy_version - row.oldest_version for row in rows]
    return [
        replace(row, lag_P=np.full(row.policy_tokens, lag, np.float32)) for row, lag in zip(rows, lags, strict=True)
    ]


def _outcome(trajectories: Trajectories, metrics: Mapping[str, float]) -> Outcome:
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Outcome(fmean(each.reward for each in trajectories) if trajectories else 0.0, finite)


def together(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """What several optimiser steps measured, as if they were one. What only some measured is of these."""

    def over_steps(name: str) -> float:
        values = [each[name] for each in found if name in each]
        if name.endswith("_max"):
            return max(values)
        return sum(values) if name in ("tokens", "skipped", "critic_skipped") else fmean(values)

    return {name: over_steps(name) for name in {name: None for each in found for name in each}}
