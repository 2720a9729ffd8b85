"""How many ranks share what."""

from dataclasses import dataclass

from rollfarm.config import ConfigError
from trainer.backend_config import MegatronConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """What the ranks are to each other."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    """Copies of the model, each with rows of its own."""


def layout(config: MegatronConfig, world_size: int) -> Layout:
    """Raises ConfigError where the ranks do not divide into copies of the model."""
    one_copy = config.tensor_parallel * config.pipeline_parallel * config.context_parallel
    if world_size % one_copy:
        raise ConfigError(
            f"trainer.megatron: one copy of the model takes tensor_parallel {config.tensor_parallel} * "
            f"pipeline_parallel {config.pipeline_parallel} * context_parallel {config.context_parallel} = {one_copy} "
            f"ranks, which does not divide the {world_size} that there are. Change the sizes, or start "
            f"{one_copy * max(1, world_size // one_copy)} ranks."
        )
    data = world_size // one_copy
    if data * config.context_parallel % config.expert_parallel:
        raise ConfigError(
            f"trainer.megatron.expert_parallel: {config.expert_parallel} does not divide the "
            f"{data * config.context_parallel} data-parallel ranks that experts are shared over. Choose a divisor."
        )
    if config.sequence_parallel and config.tensor_parallel == 1:
        raise ConfigError(
            "trainer.megatron.sequence_parallel: it shares positions over tensor-parallel ranks, and tensor_parallel "
            "is 1. Raise the one, or leave out the other."
        )
    return Layout(
        config.tensor_parallel, config.pipeline_parallel, config.context_parallel, config.expert_parallel, data
    )
