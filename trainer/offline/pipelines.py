"""What a step on records is: supervised fine-tuning, preferences, or distillation.

A pipeline says what to ask the models and what to minimise. None needs the records of a step to be in one micro-batch,
so packing and ranks change nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollfarm.records import Record, Source
from trainer.algorithms.losses import Metrics
from trainer.algorithms.preferences import Preferences, dpo
from trainer.micro_batches import MicroBatch
from trainer.objective import LossFn
from trainer.offline.config import OfflineConfig
from trainer.ranks import Leader, Role
from trainer.rows import Row, policy_token_count, with_column
from trainer.texts import Item, demonstration, preference

Rendered = Sequence[tuple[list[Row], ...]]
"""Each record's texts as rows."""

Read = Callable[[Record, Source, int], Item]
"""As `texts.demonstration`."""

TEMPERATURE = 1.0
"""Probabilities are the models' own."""

SUPERVISED, PREFERENCE, DIVERGENCE = "supervised", "preference", "divergence"


def supervised_loss(logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """A LossFn: negative log-likelihood."""
    del batch
    return -logp_P.sum(), {"entropy": entropy_P.detach().sum()}


def preference_loss(logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """A LossFn whose gradient is that of the preferences: a policy gradient, for their derivative by a whole answer is
    the same for each of its tokens."""
    return -(batch.advantage_P * logp_P).sum(), {"entropy": entropy_P.detach().sum()}


def divergence_loss(logp_P: Tensor, divergence_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """A LossFn for a policy that has its divergence from a teacher in the entropy's place."""
    del batch
    return divergence_P.sum(), {"nll": -logp_P.detach().sum()}


OBJECTIVES: Mapping[str, LossFn] = {
    SUPERVISED: supervised_loss,
    PREFERENCE: preference_loss,
    DIVERGENCE: divergence_loss,
}
"""What ranks may be asked to minimise."""


class Pipeline(Protocol):
    """One way to learn from records."""

    def step(self, batch: Rendered, lr: float) -> dict[str, float]:
        """One optimiser step, and what was measured before it: `loss` in nats, and more by name."""
        ...

    def measure(self, batch: Rendered) -> dict[str, float]:
        """What the policy is worth on these records, as means; nothing is learnt. `weight` is how much they count."""
        ...


class Imitation:
    """Minimises the mean over all tokens that are to be said: of their negative log-likelihood, or, distilling, of the
    divergence from the teacher there."""

    def __init__(self, leader: Leader, objective: str) -> None:
        self._leader = leader
        self._objective = objective

    def step(self, batch: Rendered, lr: float) -> dict[str, float]:
        rows = _rows(batch)
        norm = float(policy_token_count(rows))
        return self._leader.train_step(rows, self._objective, temperature=TEMPERATURE, norm=norm, lr=lr)

    def measure(self, batch: Rendered) -> dict[str, float]:
        logp_P = self._leader.score(_rows(batch), temperature=TEMPERATURE)
        return {"nll": -float(logp_P.double().mean()), "weight": float(len(logp_P))}


class Preference:
    """Minimises the mean loss of a pair, as `dpo` has it."""

    def __init__(self, leader: Leader, beta: float) -> None:
        self._leader = leader
        self._beta = beta

    def step(self, batch: Rendered, lr: float) -> dict[str, float]:
        found, answers = self._compare(batch)
        advantages = zip(answers, found.advantage_K2.flatten(), strict=True)
        by_token = [advantage.expand(policy_token_count(answer)) for answer, advantage in advantages]
        rows = with_column(_rows(batch), "advantage_P", torch.cat(by_token))
        norm = float(len(batch))
        metrics = self._leader.train_step(rows, PREFERENCE, temperature=TEMPERATURE, norm=norm, lr=lr)
        return {**metrics, **_summary(found)}

    def measure(self, batch: Rendered) -> dict[str, float]:
        found, _ = self._compare(batch)
        return {**_summary(found), "weight": float(len(batch))}

    def _compare(self, batch: Rendered) -> tuple[Preferences, list[list[Row]]]:
        """The pairs, and their answers one after the other."""
        answers = [answer for pair in batch for answer in pair]
        counts = [policy_token_count(answer) for answer in answers]

        def logp_K2(role: Role) -> Tensor:
            parts = self._leader.score(_rows(batch), temperature=TEMPERATURE, role=role).double().split(counts)
            return torch.stack([part.sum() for part in parts]).view(-1, 2)

        return dpo(logp_K2(Role.POLICY), logp_K2(Role.REFERENCE), beta=self._beta), answers


def reader_of(config: OfflineConfig) -> Read:
    """How the configured pipeline reads a record."""
    return preference if config.pipeline == "dpo" else demonstration


def pipeline_of(config: OfflineConfig, leader: Leader) -> Pipeline:
    """The configured one."""
    match config.pipeline:
        case "sft":
            return Imitation(leader, SUPERVISED)
        case "dpo":
            return Preference(leader, config.beta)
        case "distillation":
            return Imitation(leader, DIVERGENCE)


def _rows(batch: Rendered) -> list[Row]:
    return [row for texts in batch for rows in texts for row in rows]


def _summary(found: Preferences) -> dict[str, float]:
    return {
        "loss": float(found.loss_K.mean()),
        "margin": float(found.margin_K.mean()),
        "accuracy": float((found.margin_K > 0).double().mean()),
    }
