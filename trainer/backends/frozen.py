"""A model that never learns: a reference or a teacher. Every rank holds all of it, and ranks share rows.

It computes as a replicated policy does, from float32 weights under the same autocast: a reference that is the policy's
own beginning is then at a KL of exactly 0 from it.
"""

from trainer.backends import Settings
from trainer.backends.module import ModuleScorer
from trainer.backends.replicated import ReplicatedModel
from trainer.backends.scoring import TokenModel


class FrozenScorer(ModuleScorer):
    """A Scorer without gradients and without an optimiser."""

    def __init__(self, model: TokenModel, settings: Settings) -> None:
        super().__init__(ReplicatedModel(model.requires_grad_(False), settings), settings)
