"""PyTorch's fully_shard (Zhao et al. 2023): every rank holds its shards, and whole layers only while they compute.

Parameters, gradients and moments are DTensors in shards of their first dimension. Master weights and the sums of
gradients are float32, forward and backward passes in the compute dtype. Rank 0 reads the model; the other ranks make it
without memory and are sent their shards one tensor at a time, so that none but rank 0's host ever holds all of it.

Context parallelism is left out: torch's own is experimental and rings only through CUDA's attention kernels. Megatron
has it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rollfarm.config import ConfigError
from trainer.backend_config import Fsdp2Config
from trainer.backends import Settings
from trainer.backends.adapter_record import record_of
from trainer.backends.alone import on_rank_0
from trainer.backends.layers import keep_only_input, layers_of
from trainer.backends.meeting import meet_alone
from trainer.backends.module import Held, ModuleBackend, ModuleScorer
from trainer.backends.passes import world_size
from trainer.backends.scoring import TokenModel, empty_model, load_model
from trainer.micro_batches import MicroBatch

log = structlog.get_logger()

Make = Callable[[PreTrainedModel], TokenModel]
"""A TokenModel around a causal language model, which may be on the meta device."""


class ShardedModel(Held):
    """A model in shards over all ranks."""

    def __init__(self, make: Make, settings: Settings, config: Fsdp2Config) -> None:
        meet_alone(settings.device)
        self._settings = settings
        self._home = torch.device("cpu") if config.cpu_offload else settings.device
        source = on_rank_0(lambda: make(load_model(settings.path, packing=settings.packing)))
        with torch.device("meta"):
            self.module = make(empty_model(settings.path, packing=settings.packing))
        self.adapters = record_of(self.module.model, source.model if source else None, settings)
        mesh = init_device_mesh(settings.device.type, (world_size(),))
        _shard(self.module, mesh, settings, config)
        self._fill(source)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self.module(batch, temperature)

    def move(self, *, to_host: bool) -> torch.device:
        device = torch.device("cpu") if to_host else self._home
        if self._home.type != "cpu":
            self.module.to(device)
        return device

    def sum_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """The backward pass has."""

    def settle(self) -> None:
        # What is gathered for a backward pass that never comes would outlive the next change of the shards.
        for module in _sharded(self.module):
            module.reshard()

    def _fill(self, source: TokenModel | None) -> None:
        """Give every rank its shards of rank 0's model, and all of the buffers, which hold what no checkpoint has."""
        self.module.to_empty(device=self._home)
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._settings.device))
        params = dict(source.named_parameters()) if source else {}
        buffers = dict(source.named_buffers()) if source else {}
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                assert isinstance(param, DTensor)
                full = self._from_rank_0(params.pop(name, None), param)
                shard = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
                param.to_local().copy_(shard.to_local())
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._from_rank_0(buffers.pop(name, None), buffer))
        if params:
            raise ConfigError(
                f"model.path: {self._settings.path!r} has {', '.join(params)} of its own, though its configuration "
                "ties that to another tensor. Correct tie_word_embeddings, or choose another trainer.backend."
            )

    def _from_rank_0(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        device = self._settings.device
        full = (
            torch.empty(like.shape, dtype=like.dtype, device=device) if tensor is None else tensor.detach().to(device)
        )
        if world_size() > 1:
            dist.broadcast(full, src=0)
        return full


class Fsdp2Scorer(ModuleScorer):
    """A Scorer that never learns: a reference, or a teacher."""

    def __init__(self, make: Make, settings: Settings, config: Fsdp2Config) -> None:
        super().__init__(ShardedModel(lambda model: make(model).requires_grad_(False), settings, config), settings)


class Fsdp2Backend(ModuleBackend):
    """A Backend: a policy, or a critic."""

    def __init__(self, make: Make, settings: Settings, config: Fsdp2Config) -> None:
        super().__init__(ShardedModel(make, settings, config), settings)


def _shard(model: TokenModel, mesh: DeviceMesh, settings: Settings, config: Fsdp2Config) -> None:
    """Shard each layer, and what is around them, so that gradients are summed and never divided."""
    offload = CPUOffloadPolicy(pin_memory=settings.device.type == "cuda") if config.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=settings.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=config.reshard_after_forward,
    )
    layers = layers_of(model)
    if not layers:
        log.warning("no layers are known in this architecture: it is sharded as a whole, and gathered as a whole")
    for layer in layers:
        if config.compile:
            # Not around the checkpoint, into which it does not look.
            layer.forward = torch.compile(layer.forward)
        if config.activation_checkpointing:
            keep_only_input(layer)
        shard(layer)
    shard(model)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
