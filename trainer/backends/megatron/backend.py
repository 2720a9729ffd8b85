"""A Backend whose model Megatron-Core cuts over ranks.

Weights are kept in float32 beside those that compute where these are narrower, gradients are summed in float32 over
data-parallel and context-parallel ranks, and each rank steps what it holds by AdamW. Whatever leaves or enters goes by
Hugging Face's names and shapes, checkpoints too: any sizes read what any others wrote.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from rollfarm.config import ConfigError
from trainer.backend_config import MegatronConfig
from trainer.backends import Settings, Write
from trainer.backends.distributed_checkpoint import OPTIMIZER_PREFIX, DistributedCheckpoint
from trainer.backends.exporting import FILE_SIZE, write_on_rank_0
from trainer.backends.megatron import cpu
from trainer.backends.megatron.cut_model import CutModel
from trainer.backends.megatron.weights import Weights
from trainer.backends.optimizers import Decay, Optimizer
from trainer.backends.passes import Measured, is_sound, over_ranks, step_metrics
from trainer.micro_batches import micro_batch
from trainer.objective import LossFn
from trainer.rows import Row

MODEL_PREFIX = "model."
"""Before Hugging Face's names in checkpoints, where other backends have their model under this name."""


class MegatronBackend(CutModel):
    """A Backend."""

    def __init__(self, settings: Settings, config: MegatronConfig) -> None:
        """Raises ConfigError."""
        if settings.optimizer != "adamw":
            raise ConfigError(
                f"trainer.optimizer: the megatron backend steps by 'adamw' alone, not {settings.optimizer!r}. Choose "
                "it, or another trainer.backend."
            )
        if settings.lora is not None:
            raise ConfigError(
                "trainer.lora: the megatron backend has no adapters yet. Leave out [trainer.lora], or choose "
                "trainer.backend = 'fsdp2'."
            )
        super().__init__(settings, config)
        with cpu.running():
            self._sharded = DistributedDataParallel(
                self._model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self._model
            )
        self._params = dict(self._model.named_parameters())
        self._masters = {name: _master(param) for name, param in self._params.items()}
        self._weights = Weights(self._arch, self._groups, self._masters)
        self._weights.read(settings.path)
        self._narrow()
        decay = Decay(settings.weight_decay, settings.betas)
        self._optimizer = Optimizer(settings.optimizer, self._masters, set(), decay)
        self._checkpoint = DistributedCheckpoint()

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        measured = Measured()

        def lose(logp_P: Tensor, entropy_P: Tensor, places: Sequence[int]) -> Tensor:
            batch = micro_batch(rows, places, self._settings.device)
            loss_sum, metrics = loss_fn(logp_P, entropy_P, batch)
            loss = loss_sum / max(norm, 1e-12)
            measured.add({"loss": loss, **metrics})
            return loss

        self._sharded.zero_grad_buffer()
        self._passes(rows, lose, temperature=temperature, forward_only=False)
        with cpu.running():
            finalize_model_grads([self._sharded])
        totals = self._told(measured.totals())
        grad_norm = self._clip()
        sound = is_sound(totals, grad_norm)
        if sound:
            self._optimizer.step(lr)
            self._narrow()
        self._optimizer.zero_grad()
        return step_metrics(totals, rows, grad_norm=grad_norm, lr=lr, sound=sound)

    def reset_optimizer(self) -> None:
        self._optimizer.reset()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights.stream()

    def save(self, folder: Path) -> Write:
        tensors: dict[str, Tensor] = {}
        for prefix, name, tensor in self._state():
            shards = self._weights.shards(name, tensor)
            tensors.update({f"{prefix}{theirs}": shard for theirs, shard in shards.items()})
        return self._checkpoint.save(folder, tensors, shapes=self._shapes())

    def load(self, folder: Path) -> None:
        state = [(prefix, name, tensor, self._weights.shards(name, tensor)) for prefix, name, tensor in self._state()]
        wanted = {f"{prefix}{theirs}": shard for prefix, _, _, shards in state for theirs, shard in shards.items()}
        self._checkpoint.load(folder, wanted, model=self._settings.path, shapes=self._shapes())
        for _, name, tensor, shards in state:
            self._weights.put_back(name, tensor, shards)
        self._narrow()

    def export(self, folder: Path) -> None:
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.named_tensors()}
        if self._arch.tied:
            tensors.pop("lm_head.weight", None)

        def write() -> None:
            save_torch_state_dict(tensors, folder, max_shard_size=FILE_SIZE)
            self._hf_config.dtype = torch.float32
            self._hf_config.save_pretrained(folder)
            _generation_config(self._settings.path, self._hf_config).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self._settings.path).save_pretrained(folder)

        write_on_rank_0(folder, write)

    def offload(self) -> None:
        if self._settings.device.type != "cpu":
            self._sharded.offload_grad_buffers()
        super().offload()

    def reload(self) -> None:
        super().reload()
        if self._settings.device.type != "cpu":
            self._sharded.restore_grad_buffers()

    @property
    def _chunk(self) -> nn.Module:
        return self._sharded

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        for master in self._masters.values():
            master.data = master.data.to(device)
        self._optimizer.move(device)

    def _clip(self) -> float:
        """Scales gradients and hands them to the masters. The norm of all of them, before; the same on every rank."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._settings.device)
        for name, param in self._params.items():
            if self._weights.counts_once(name):
                squares[int(self._weights.is_experts(name))] += _gradient(param).square().sum(dtype=torch.float64)
        dense, experts = squares.cpu()
        dist.all_reduce(dense, group=self._groups.all.mp)
        dist.all_reduce(experts, group=self._groups.all.tp_ep_pp)
        norm = math.sqrt(float(dense + experts))
        most = self._settings.max_grad_norm
        for name, param in self._params.items():
            gradient = _gradient(param)
            if most and norm > most:
                gradient.mul_(most / (norm + 1e-6))
            self._masters[name].grad = gradient
        return norm

    def _narrow(self) -> None:
        """Round the masters to the weights that compute, where these are narrower."""
        with torch.no_grad():
            for name, param in self._params.items():
                if self._masters[name] is not param:
                    param.copy_(self._masters[name])

    def _told(self, totals: dict[str, float]) -> dict[str, float]:
        """The metrics of all rows, on every rank: the last stage has them, and tells the others."""
        if self._groups.is_last_stage:
            totals = over_ranks(totals, self._groups.all.dp)
        if self._groups.layout.pipeline == 1:
            return totals
        last = dist.get_world_size() - 1
        text = json.dumps(totals).encode()
        length = torch.tensor(len(text))
        dist.broadcast(length, src=last)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if dist.get_rank() == last:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(data, src=last)
        return json.loads(data.numpy().tobytes())

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every tensor to be kept: what goes before its name in a checkpoint, its parameter, and itself."""
        yield from ((MODEL_PREFIX, name, master) for name, master in self._masters.items())
        for key, tensor in self._optimizer.state().items():
            moment, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
            yield f"{OPTIMIZER_PREFIX}{moment}.{MODEL_PREFIX}", name, tensor

    def _shapes(self) -> dict[str, list[int]]:
        """Of a checkpoint's tensors, also of those that other ranks have."""
        scalars = {prefix: tensor.ndim == 0 for prefix, _, tensor in self._state()}
        return {
            f"{prefix}{name}": [1] if is_scalar else list(shape)
            for name, shape in self._weights.names()
            for prefix, is_scalar in scalars.items()
        }


def _master(param: nn.Parameter) -> nn.Parameter:
    """What the optimiser steps."""
    return param if param.dtype is torch.float32 else nn.Parameter(param.detach().float())


def _gradient(param: nn.Parameter) -> Tensor:
    """Where Megatron-Core has summed it, f32."""
    return param.main_grad  # pyright: ignore[reportAttributeAccessIssue]


def _generation_config(path: str, config: PreTrainedConfig) -> GenerationConfig:
    """The model's own, where it has one: stop tokens may stand there alone."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(config)
