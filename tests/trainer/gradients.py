"""Losses and gradients of every aggregation, as one rank of some: MODEL FOLDER TOKEN_BUDGET.

Rank 0 leaves FOLDER/gradients.safetensors: a flat gradient of all parameters and a loss for each case of `CASES`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from tests.trainer.conftest import random_rows
from trainer import ranks
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.backends.passes import backward_pass
from trainer.backends.scoring import TokenLogprobs, TokenModel, load_model
from trainer.config import TrainerConfig
from trainer.objective import Target, policy_objective
from trainer.rows import Row

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"aggregation": name} for name in AGGREGATIONS if name != "seq_mean_token_sum_norm"},
    "seq_mean_token_sum_norm": {"aggregation": "seq_mean_token_sum_norm", "aggregation_settings": {"length": 16}},
    "gspo": {"loss": "gspo", "aggregation": "seq_mean_token_mean"},
    "gspo of actions": {"loss": "gspo", "loss_settings": {"per": "action"}},
    "gmpo": {"loss": "gmpo"},
    "everything": {"kl": {"loss": 0.3}, "entropy_bonus": 0.1, "correction": "masked"},
}
"""What each case adds to the defaults."""

ROWS = [*random_rows(23, seed=5), Row(random_rows(1)[0].ids_T, random_rows(1)[0].mask_T & False)]
"""One of them without a token of the policy."""


def gradients(model: TokenModel, token_budget: int) -> dict[str, Tensor]:
    """f64 by case: the loss, and then the gradient, each summed over ranks."""
    found: dict[str, Tensor] = {}
    for name, settings in SETTINGS.items():
        objective: Target = policy_objective(TrainerConfig.model_validate(settings))
        model.zero_grad()
        totals = backward_pass(
            ROWS,
            model,
            objective,
            temperature=0.8,
            norm=objective.norm(ROWS),
            token_budget=token_budget,
            device=torch.device("cpu"),
            padded=model.padded,
        )
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads])
        if dist.is_initialized():
            dist.all_reduce(flat)
        found[name] = torch.cat([torch.tensor([totals["loss"]]), flat])
    return found


def load(path: str) -> TokenModel:
    return TokenLogprobs(load_model(path))


def main(path: str, folder: str, token_budget: str) -> None:
    ranks.join(torch.device("cpu"), timeout_seconds=60)
    found = gradients(load(path), int(token_budget))
    if ranks.rank() == 0:
        save_file(found, Path(folder) / "gradients.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
