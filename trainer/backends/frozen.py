"""A model that never learns: a reference or a teacher. Every rank holds all of it, and ranks share rows.

It computes as the policy does, from float32 weights under the same autocast: a reference that is the policy's own
beginning is then at a KL of exactly 0 from it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.backends import Settings
from trainer.backends.passes import score_pass
from trainer.backends.scoring import TokenModel
from trainer.micro_batches import MicroBatch
from trainer.rows import Row


class FrozenScorer:
    """A Scorer without an optimiser."""

    def __init__(self, model: TokenModel, settings: Settings) -> None:
        self._settings = settings
        self._model = model.to(settings.device).eval().requires_grad_(False)

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        return score_pass(
            rows,
            self._forward,
            temperature=temperature,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
            padded=self._model.padded,
        )

    def offload(self) -> None:
        self._model.to("cpu")

    def reload(self) -> None:
        self._model.to(self._settings.device)

    def _forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = self._settings.compute_dtype
        with torch.autocast(self._settings.device.type, dtype, enabled=dtype is torch.bfloat16):
            return self._model(batch, temperature)
