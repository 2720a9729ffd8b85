"""Learning without a farm: groups in, metrics and weights out. Synchronous, and run in one thread.

The result of a step is a pure function of the weights, the batch and the configuration.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import structlog
import torch

from rollfarm.run import ModelConfig, RunConfig
from rollfarm.v1 import sample_buffer_pb2
from trainer import warm_start
from trainer.algorithms.advantages import Advantage
from trainer.algorithms.samples import Samples
from trainer.backends import Write
from trainer.backends.build import build_models
from trainer.config import TrainerConfig, TrainerRoot
from trainer.objective import Objective, advantage_of, policy_objective, supervised_objective
from trainer.ranks import Leader
from trainer.rows import Row, rows_of, with_column
from trainer.samples import samples_of
from trainer.weights.snapshot import Snapshot, take_snapshot

log = structlog.get_logger()

POLICY, SUPERVISED = "policy", "supervised"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step measured."""

    mean_reward: float
    """Of the batch's trajectories."""

    metrics: dict[str, float]
    """Finite values by name."""


def objectives(config: TrainerConfig) -> dict[str, Objective]:
    """What ranks may be asked to minimise, by name."""
    return {POLICY: policy_objective(config), SUPERVISED: supervised_objective()}


def build_learner(root: TrainerRoot) -> "Learner":
    """Rank 0's learner. Raises ConfigError."""
    known = objectives(root.trainer)
    leader = Leader(build_models(root.model, root.trainer), known)
    return Learner(leader, known, advantage_of(root.trainer), root.run, root.model, root.trainer)


class Learner:
    """The policy as it is now, and how it learns from a batch."""

    def __init__(
        self,
        leader: Leader,
        known: dict[str, Objective],
        advantage: Advantage,
        run: RunConfig,
        model: ModelConfig,
        config: TrainerConfig,
    ) -> None:
        self.leader = leader
        self._objectives = known
        self._advantage = advantage
        self._run = run
        self._model = model
        self._config = config

    def learn(self, batch: sample_buffer_pb2.Batch, groups: Sequence[sample_buffer_pb2.Group]) -> Outcome:
        """One optimiser step on the batch. A step that is not finite changes nothing but is counted."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        samples = self._samples(groups, batch.step)
        rows_of_each = [rows_of(each) for each in trajectories]
        rows = with_column([row for each in rows_of_each for row in each], "advantage_P", self._advantage(samples))
        metrics = self._improve(rows, batch.step)
        if metrics["skipped"]:
            log.error(
                "step skipped: loss or gradient is not finite",
                step=batch.step,
                batch_id=batch.batch_id,
                group_ids=[group.group_id for group in groups],
            )
        lags = [batch.policy_version - min(row.oldest_version for row in each) for each in rows_of_each]
        names = sorted({name for each in trajectories for name in each.metrics})
        metrics |= {
            "reward_std": float(samples.reward_N.std(correction=0)),
            "staleness": fmean(lags),
            "staleness_max": max(lags),
            "zero_advantage_share": fmean(not row.advantage_P.any() for row in rows),
            "episode_tokens": sum(map(len, rows)) / len(trajectories),
            "episode_segments": len(rows) / len(trajectories),
            **{
                f"episode_{name}": fmean(each.metrics[name] for each in trajectories if name in each.metrics)
                for name in names
            },
        }
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return Outcome(float(samples.reward_N.mean()), finite)

    def _improve(self, rows: Sequence[Row], step: int) -> dict[str, float]:
        """The optimiser steps of a batch, and what they measured on average."""
        count, temperature = min(self._config.steps_per_batch, len(rows)), self._run.sampling.temperature
        if count * self._config.passes > 1:
            rows = with_column(rows, "proximal_logp_P", self.leader.score(rows, temperature=temperature))
        measured: list[dict[str, float]] = []
        for part in [rows[index::count] for index in range(count)] * self._config.passes:
            norm = self._objectives[POLICY].norm(part)
            measured.append(
                self.leader.train_step(part, POLICY, temperature=temperature, norm=norm, lr=self.lr_at(step))
            )
        return together(measured)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        config, total = self._config, self._run.steps
        warmth = min(1.0, (step + 1) / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
        done = min(1.0, step / total) if total else 0.0
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return config.lr * warmth * shape[config.lr_schedule]

    def warm_start(self) -> Iterator[float]:
        """Supervised steps, one for each item: its loss. The optimiser is fresh afterwards."""
        from transformers import AutoTokenizer

        settings = self._config.warm_start
        if settings.data is None or settings.steps == 0:
            return
        tokenizer = AutoTokenizer.from_pretrained(self._model.path)
        rows = [
            warm_start.conversation_row(tokenizer, messages)
            for messages in warm_start.load_conversations(settings.data)
        ]
        chosen = warm_start.batches(rows, batch_size=settings.batch_size, steps=settings.steps, seed=self._config.seed)
        for step, batch in enumerate(chosen):
            lr = settings.lr * (1 - step / settings.steps)
            norm = self._objectives[SUPERVISED].norm(batch)
            measured = self.leader.train_step(batch, SUPERVISED, temperature=1.0, norm=norm, lr=lr)
            yield measured.get("loss", math.nan)
        self.leader.reset_optimizer()

    def snapshot(self, policy_version: int) -> Snapshot:
        """A copy of the weights for engines."""
        return take_snapshot(
            self.leader.named_tensors(),
            policy_version=policy_version,
            dtype=getattr(torch, self._model.dtype),
            bucket_size_bytes=self._config.bucket_size_mb * 1024 * 1024,
        )

    def save(self, folder: Path) -> Write:
        return self.leader.save(folder)

    def load(self, folder: Path) -> None:
        self.leader.load(folder)

    def export(self, folder: Path) -> None:
        self.leader.export(folder)

    def _samples(self, groups: Sequence[sample_buffer_pb2.Group], step: int) -> Samples:
        samples = samples_of(groups)
        if not self._config.shuffle_scores:
            return samples
        dice = torch.Generator().manual_seed(hash((self._config.seed, step)) & 0x7FFFFFFF)
        dealt_N = samples.reward_N[torch.randperm(len(samples.reward_N), generator=dice)]
        return replace(samples, reward_N=dealt_N, step_reward_K=torch.zeros_like(samples.step_reward_K))


def together(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """What several optimiser steps measured, as if they were one."""
    if len(measured) == 1:
        return measured[0]

    def over_steps(name: str) -> float:
        values = [each[name] for each in measured]
        if name.endswith("_max"):
            return max(values)
        return sum(values) if name in ("tokens", "skipped") else fmean(values)

    return {name: over_steps(name) for name in measured[0]}
