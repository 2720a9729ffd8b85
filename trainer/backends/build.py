"""The models of a run, as the configuration asks for them."""

import torch

from rollfarm.run import ModelConfig
from trainer.backends import Backend, Settings
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, load_model
from trainer.config import TrainerConfig
from trainer.ranks import Models, Role, choose_device, join


def build_models(model: ModelConfig, config: TrainerConfig) -> Models:
    """This rank's models and optimisers, after it met the other ranks. Raises ConfigError."""
    device = choose_device(config.device)
    join(device, config.rank_timeout_seconds)
    settings = Settings(
        path=model.path,
        device=device,
        compute_dtype=getattr(torch, model.dtype),
        micro_batch_tokens=config.micro_batch_tokens,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
        betas=config.betas,
    )
    return Models({Role.POLICY: _policy(settings, config)})


def _policy(settings: Settings, config: TrainerConfig) -> Backend:
    # Other backends bring libraries that not everybody has: each is imported where it is asked for.
    match config.backend:
        case "torch":
            return ReplicatedBackend(TokenLogprobs(load_model(settings.path)), settings)
