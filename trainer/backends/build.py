"""The models of a run, as the configuration asks for them.

Backends bring libraries that not everybody has: each is imported where it is asked for.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig
from trainer.algorithms.divergence import entropy_and_kl, kl_of_teacher
from trainer.backends import Backend, Scorer, Settings
from trainer.backends.comparing import Compared, load_teacher
from trainer.backends.frozen import FrozenScorer
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, TokenValues, load_model
from trainer.config import TrainerConfig
from trainer.ranks import Models, Role, choose_device, join


def build_models(model: ModelConfig, config: TrainerConfig) -> Models:
    """This rank's models and optimisers, after it met the other ranks. Raises ConfigError."""
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join(device, config.rank_timeout_seconds)
    settings = Settings(
        path=model.path,
        device=device,
        # float16 would want its losses scaled.
        compute_dtype=torch.bfloat16 if model.dtype == "bfloat16" else torch.float32,
        micro_batch_tokens=config.micro_batch_tokens,
        max_grad_norm=config.max_grad_norm,
        optimizer=config.optimizer,
        weight_decay=config.weight_decay,
        betas=config.betas,
        packing=config.packing,
        lora=config.lora,
        seed=config.seed,
    )
    reference = _whole_reference(settings, config) if config.offline is None and config.kl.is_exact else None
    learners: dict[Role, Backend] = {Role.POLICY: _policy(settings, config, reference)}
    if config.critic is not None:
        learners[Role.CRITIC] = _critic(replace(settings, path=config.critic.path or model.path), config)
    scorers: dict[Role, Scorer] = {}
    if reference is not None:
        scorers[Role.REFERENCE] = FrozenScorer(reference, settings)
    elif config.needs_reference:
        scorers[Role.REFERENCE] = _reference(learners[Role.POLICY], settings, config)
    if config.teacher is not None and config.offline is None:
        scorers[Role.TEACHER] = _frozen(replace(settings, path=config.teacher.path), config)
    return Models(learners, scorers)


def _policy(settings: Settings, config: TrainerConfig, reference: TokenLogprobs | None) -> Backend:
    make = _policy_maker(settings, config, reference)
    match config.backend:
        case "torch":
            return ReplicatedBackend(make(load_model(settings.path, packing=settings.packing)), settings)
        case "fsdp2":
            from trainer.backends.fsdp2 import Fsdp2Backend

            return Fsdp2Backend(make, settings, config.fsdp2)
        case "deepspeed":
            from trainer.backends.zero import ZeroBackend

            return ZeroBackend(make, settings, config.deepspeed)
        case "megatron":
            from trainer.backends.megatron.backend import MegatronBackend

            return MegatronBackend(settings, config.megatron)


def _policy_maker(
    settings: Settings, config: TrainerConfig, reference: TokenLogprobs | None
) -> Callable[[PreTrainedModel], TokenLogprobs]:
    """How a model becomes a policy: it may have its reference beside it, or on records its teacher."""
    if reference is not None:
        return lambda model: Compared(_logprobs(settings, model).model, reference, entropy_and_kl)
    if config.offline is not None and config.teacher is not None:
        teacher = load_teacher(config.teacher.path, settings)
        return lambda model: Compared(_logprobs(settings, model).model, teacher, kl_of_teacher)
    return partial(_logprobs, settings)


def _logprobs(settings: Settings, model: PreTrainedModel) -> TokenLogprobs:
    """A policy, with the adapters that are asked for."""
    if settings.lora is not None:
        from trainer.backends.lora import add_adapters

        add_adapters(model, settings.lora, seed=settings.seed)
    return TokenLogprobs(model)


def _critic(settings: Settings, config: TrainerConfig) -> Backend:
    match config.backend:
        case "torch":
            return ReplicatedBackend(TokenValues(load_model(settings.path, packing=settings.packing)), settings)
        case "fsdp2":
            from trainer.backends.fsdp2 import Fsdp2Backend

            return Fsdp2Backend(TokenValues, settings, config.fsdp2)
        case "deepspeed":
            from trainer.backends.zero import ZeroBackend

            return ZeroBackend(TokenValues, settings, config.deepspeed)
        case "megatron":
            raise ConfigError(
                "trainer.critic: the backend 'megatron' cannot hold a critic yet. Choose trainer.backend = 'torch', or "
                "an advantage without a critic."
            )


def _reference(policy: Backend, settings: Settings, config: TrainerConfig) -> Scorer:
    if config.lora is not None and not config.kl.reference:
        from trainer.backends.lora import WithoutAdapters
        from trainer.backends.module import ModuleBackend

        assert isinstance(policy, ModuleBackend)
        return WithoutAdapters(policy)
    return _frozen(replace(settings, path=config.kl.reference or settings.path), config)


def _whole_reference(settings: Settings, config: TrainerConfig) -> TokenLogprobs:
    return TokenLogprobs(load_model(config.kl.reference or settings.path, packing=settings.packing))


def _frozen(settings: Settings, config: TrainerConfig) -> Scorer:
    """A model that never learns. Ranks share rows; but for "fsdp2", which has shards, each holds the whole model."""
    if config.backend == "fsdp2":
        from trainer.backends.fsdp2 import Fsdp2Scorer

        return Fsdp2Scorer(TokenLogprobs, settings, config.fsdp2)
    if config.backend == "deepspeed":
        from trainer.backends.zero import frozen

        return frozen(TokenLogprobs, settings, config.deepspeed)
    if config.backend == "megatron":
        from trainer.backends.megatron.cut_model import MegatronScorer

        return MegatronScorer(settings, config.megatron)
    return FrozenScorer(TokenLogprobs(load_model(settings.path, packing=settings.packing)), settings)
