"""What each token of a batch is worth: models are asked, rewards shaped, advantages found, rows left out.

What is remembered from step to step (the coefficient of the KL penalty, the moments of rewards) is `state`, which
belongs into a checkpoint.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithms import shaping
from trainer.algorithms.advantages import Advantage
from trainer.algorithms.divergence import ESTIMATORS, steered
from trainer.algorithms.samples import Samples, count_by
from trainer.algorithms.shaping import Moments
from trainer.config import TrainerConfig
from trainer.ranks import Leader, Role
from trainer.rows import Row, column, with_column


@dataclass(frozen=True, slots=True)
class Judged:
    """What to learn from."""

    rows: list[Row]
    """Those with anything to learn, every column filled."""

    metrics: dict[str, float]
    """What was found on the way."""


class Judge:
    """Asks the models that there are. Rank 0's, in the thread of the models."""

    def __init__(self, leader: Leader, advantage: Advantage, config: TrainerConfig, *, temperature: float) -> None:
        self._leader = leader
        self._advantage = advantage
        self._shaping = config.shaping
        self._kl = config.kl
        self._teacher_coef = config.teacher.coef if config.teacher else 0.0
        self._needs_proximal = (
            config.steps_per_batch * config.passes > 1 or config.kl.penalty > 0 or config.teacher is not None
        )
        self._temperature = temperature
        self._kl_coefficient = config.kl.penalty
        self._rewards = Moments()

    def judge(self, samples: Samples, rows: Sequence[Row], truncated_N: Tensor) -> Judged:
        """The batch, judged. `rows` hold the tokens of `samples` in their order; bool[N] which trajectories a limit
        ended."""
        rows, samples, metrics = self._ask(rows, samples)
        shaped = self._shaped_rewards(samples)
        advantage_P = self._advantage(shaped)
        if shaped.value_P is not None:
            rows = with_column(rows, "return_P", advantage_P + shaped.value_P)
        rows = with_column(rows, "advantage_P", self._shaped_advantages(advantage_P, shaped))
        kept = self._kept_N(samples, truncated_N)[_trajectory_of(rows, samples)].tolist()
        left = [row for row, is_kept in zip(rows, kept, strict=True) if is_kept and row.policy_tokens]
        return Judged(left, {**metrics, "dropped_rows_share": 1 - sum(kept) / len(rows)})

    def state(self) -> dict[str, float]:
        """What the next batch is judged by, beside the models."""
        moments = self._rewards
        return {
            "kl_coefficient": self._kl_coefficient,
            "reward_count": moments.count,
            "reward_mean": moments.mean,
            "reward_square": moments.square,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from there; a state without a name is of a run that did not need it. A coefficient that is not steered
        is the configuration's."""
        if self._kl.target:
            self._kl_coefficient = state.get("kl_coefficient", self._kl_coefficient)
        self._rewards = Moments(
            int(state.get("reward_count", 0)), state.get("reward_mean", 0.0), state.get("reward_square", 0.0)
        )

    def _ask(self, rows: Sequence[Row], samples: Samples) -> tuple[list[Row], Samples, dict[str, float]]:
        rows, metrics = list(rows), dict[str, float]()
        if self._needs_proximal:
            rows = with_column(rows, "proximal_logp_P", self._score(rows, Role.POLICY))
        if self._kl.scores_reference:
            rows = with_column(rows, "reference_logp_P", self._score(rows, Role.REFERENCE))
        if Role.CRITIC in self._leader.roles:
            rows = with_column(rows, "old_value_P", self._score(rows, Role.CRITIC))
            samples = replace(samples, value_P=column(rows, "old_value_P"))
        if Role.TEACHER in self._leader.roles:
            gap_P = self._score(rows, Role.TEACHER).double() - column(rows, "proximal_logp_P")
            samples, metrics["kl_teacher"] = replace(samples, teacher_gap_P=gap_P), -float(gap_P.mean())
        if self._kl.penalty:
            samples, charged = self._charge(rows, samples)
            metrics |= charged
        return rows, samples, metrics

    def _score(self, rows: Sequence[Row], role: Role) -> Tensor:
        return self._leader.score(rows, temperature=self._temperature, role=role)

    def _charge(self, rows: Sequence[Row], samples: Samples) -> tuple[Samples, dict[str, float]]:
        """Charge tokens for their KL to the reference, and steer the coefficient for the next batch."""
        estimate = ESTIMATORS[self._kl.penalty_estimator]
        kl_P = estimate(column(rows, "proximal_logp_P") - column(rows, "reference_logp_P"))
        coefficient, per_trajectory = self._kl_coefficient, float(kl_P.sum()) / len(samples.reward_N)
        if self._kl.target and math.isfinite(per_trajectory):
            self._kl_coefficient = steered(coefficient, per_trajectory, self._kl.target, self._kl.gain)
        return replace(samples, penalty_P=coefficient * kl_P), {
            "kl_charged": float(kl_P.mean()),
            "kl_charged_trajectory": per_trajectory,
            "kl_coefficient": coefficient,
        }

    def _shaped_rewards(self, samples: Samples) -> Samples:
        config, reward_N = self._shaping, samples.reward_N
        if config.overlong_tokens:
            reward_N = reward_N + shaping.overlong(
                _tokens_N(samples),
                limit=config.overlong_tokens,
                buffer=config.overlong_buffer,
                penalty=config.overlong_penalty,
            )
        if config.reward_normalization == "running":
            self._rewards = self._rewards.with_more(reward_N)
        reward_N, factor_N = shaping.standardized(reward_N, samples.group_N, config.reward_normalization, self._rewards)
        return replace(
            samples,
            reward_N=shaping.bounded(reward_N, config.reward_clip),
            step_reward_K=samples.step_reward_K * factor_N[samples.trajectory_K],
        )

    def _shaped_advantages(self, advantage_P: Tensor, samples: Samples) -> Tensor:
        config = self._shaping
        if config.whiten:
            advantage_P = shaping.whitened(advantage_P)
        advantage_P = shaping.bounded(advantage_P, config.advantage_clip)
        if config.length_weight:
            weight_N = shaping.length_weights(_tokens_N(samples), config.length_weight)
            advantage_P = advantage_P * weight_N[samples.trajectory_P]
        if self._teacher_coef and samples.teacher_gap_P is not None:
            advantage_P = advantage_P + self._teacher_coef * samples.teacher_gap_P
        return advantage_P

    def _kept_N(self, samples: Samples, truncated_N: Tensor) -> Tensor:
        """bool[N], the trajectories to learn from, by their rewards as they were scored."""
        config = self._shaping
        kept_N = shaping.of_fit_difficulty(
            samples.reward_N, samples.group_N, config.difficulty_low, config.difficulty_high
        )
        return kept_N & ~truncated_N if config.drop_truncated else kept_N


def _tokens_N(samples: Samples) -> Tensor:
    return count_by(samples.trajectory_P, len(samples.reward_N))


def _trajectory_of(rows: Sequence[Row], samples: Samples) -> Tensor:
    """i64, the trajectory of each row; of a row without tokens any, for it is left out."""
    counts = torch.tensor([row.policy_tokens for row in rows])
    first = (counts.cumsum(0) - counts).clamp(max=len(samples.action_P) - 1)
    return samples.trajectory_P[first]
