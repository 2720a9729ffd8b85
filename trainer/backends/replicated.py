"""Plain torch: every rank holds the whole model and optimiser, gradients are summed over ranks."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.backends import Settings
from trainer.backends.adapter_record import record_of
from trainer.backends.module import Held, ModuleBackend
from trainer.backends.passes import world_size
from trainer.backends.scoring import TokenModel
from trainer.micro_batches import MicroBatch

REDUCE_NUMEL = 16 * 1024 * 1024
"""Gradients of at most this many elements are summed in one collective."""


class ReplicatedModel(Held):
    """A model that fits on one device, as rank 0 has it. Ranks are those of torch.distributed, if it is initialised."""

    def __init__(self, model: TokenModel, settings: Settings) -> None:
        self.adapters = record_of(model.model, model.model, settings)
        self.module = model.to(settings.device)
        self._settings = settings
        if world_size() > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = self._settings.compute_dtype
        with torch.autocast(self._settings.device.type, dtype, enabled=dtype is torch.bfloat16):
            return self.module(batch, temperature)

    def move(self, *, to_host: bool) -> torch.device:
        device = torch.device("cpu") if to_host else self._settings.device
        self.module.to(device)
        return device

    def sum_gradients(self, params: Sequence[nn.Parameter]) -> None:
        if world_size() == 1:
            return
        for chunk in _chunks(params, REDUCE_NUMEL):
            grads = [param.grad if param.grad is not None else torch.zeros_like(param) for param in chunk]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for param, summed in zip(chunk, flat.split([grad.numel() for grad in grads]), strict=True):
                param.grad = summed.view_as(param)

    def settle(self) -> None:
        """Nothing is kept for a backward pass."""


class ReplicatedBackend(ModuleBackend):
    """A Backend: a policy, or a critic."""

    def __init__(self, model: TokenModel, settings: Settings) -> None:
        super().__init__(ReplicatedModel(model, settings), settings)


def _chunks(params: Sequence[nn.Parameter], numel: int) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of at most `numel` elements together; a larger one is alone."""
    chunk: list[nn.Parameter] = []
    for param in params:
        if chunk and sum(each.numel() for each in chunk) + param.numel() > numel:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk
