"""The tables of [trainer] that say how models are held and what of them learns.

They stand outside trainer.backends, which imports torch: `--help` and a wrong key need none of it.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from rollfarm.config import Config, ConfigError

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
"""A name of trainer.backends.optimizers."""


class Fsdp2Config(Config):
    """The backend "fsdp2": parameters, gradients and moments lie in shards over all ranks, whole layers only while they
    compute."""

    reshard_after_forward: bool = True
    """Whether a layer's whole weights are freed after its forward pass and gathered again for the backward pass. False
    sends a third less over the network, and every rank's memory then holds the whole model between the two."""

    activation_checkpointing: bool = False
    """Whether a layer keeps only its input, and computes the rest again in the backward pass: far less memory for about
    a third more time."""

    cpu_offload: bool = False
    """Whether shards, gradients and moments live in host memory, and the optimiser steps there. The accelerator then
    holds one layer and the activations; every pass waits for the transfer."""

    compile: bool = False
    """Whether each layer is compiled by torch.compile. The first passes take minutes; nothing is gained on a CPU."""


class DeepSpeedConfig(Config):
    """The backend "deepspeed": ZeRO (Rajbhandari et al. 2020)."""

    stage: Literal[1, 2, 3] = 2
    """What lies in shards over all ranks: 1 master weights and moments; 2 gradients too; 3 parameters too, of which
    every pass gathers a layer at a time. Stage 1 adds up the gradients of micro-batches in the compute dtype, the
    others in float32."""

    offload_optimizer: bool = False
    """Whether master weights and moments live in host memory, and the optimiser steps there. Steps become slower."""

    offload_parameters: bool = False
    """Whether the shards of parameters live in host memory too. Needs stage 3; every pass waits for the transfer."""

    whole_up_to: int = Field(default=100_000, ge=0)
    """In stage 3, parameters of at most so many elements stay whole on every rank, which saves many small transfers. 0
    has them all in shards."""

    activation_checkpointing: bool = False
    """Whether a layer keeps only its input, and computes the rest again in the backward pass: far less memory for about
    a third more time."""

    @model_validator(mode="after")
    def _has_shards_to_offload(self) -> Self:
        if self.offload_parameters and self.stage < 3:
            raise ValueError("offload_parameters needs stage 3: before that, every rank computes with whole parameters")
        return self


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021): only they learn, and the model that the run began with is frozen."""

    rank: int = Field(default=16, ge=1)
    """Inner size of an adapter. Its parameters grow with it."""

    alpha: float = Field(default=32.0, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""

    targets: tuple[str, ...] = ()
    """Last parts of the names of the linear layers that get one, such as "q_proj". Empty is every one of the decoder,
    and never the head."""


class MegatronConfig(Config):
    """The backend "megatron". Ranks that these sizes leave over are data-parallel: as many copies of the model."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every matrix. They talk in each layer, so they belong on one machine; it divides the model's
    key-value heads."""

    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages of consecutive layers, each on ranks of its own. It divides the model's layers, and stages idle at both
    ends of a step: the more micro-batches, the less."""

    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each row's positions, for rows whose activations do not fit on one."""

    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts of a mixture; they are taken from the data-parallel ones. It divides the number of
    experts. 1 is right for a dense model."""

    sequence_parallel: bool = False
    """Share the positions between layers over the tensor-parallel ranks too: less memory for the same traffic."""

    recompute: bool = False
    """Compute every layer again in the backward pass instead of keeping its activations: a third more time, and a
    small part of the memory."""


OF_TORCH = ("torch", "fsdp2")
"""Backends that hold torch's own modules."""


def check_backend(backend: str, optimizer: OptimizerName, lora: LoraConfig | None) -> None:
    """Raise ConfigError for what this backend cannot do."""
    if backend in OF_TORCH:
        return
    for key, asked in (("optimizer", optimizer != "adamw"), ("lora", lora is not None)):
        if asked:
            raise ConfigError(
                f"trainer.{key}: the backend {backend!r} has AdamW over the whole model, and nothing else. Remove it, "
                f"or choose one of {', '.join(OF_TORCH)}."
            )
