"""What torch's own backends do alike: a TokenModel that is held whole or in shards, and an optimiser over it.

Float32 master weights and no randomness: the same rows give the same weights, whatever the number of ranks and
micro-batches, up to the order of float sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollfarm.checkpoint_names import CheckpointNames
from trainer.backends import Settings, Write
from trainer.backends.adapter_record import AdapterRecord, check_record
from trainer.backends.distributed_checkpoint import DistributedCheckpoint, notes_of
from trainer.backends.exporting import export_model
from trainer.backends.lora import merged, names_without, whole, write_adapter
from trainer.backends.optimizers import Decay, Optimizer, hidden_matrices
from trainer.backends.passes import backward_pass, is_sound, score_pass, step_metrics
from trainer.backends.scoring import TokenModel
from trainer.micro_batches import MicroBatch
from trainer.objective import LossFn
from trainer.rows import Row

ADAPTERS = "adapters"
"""The note in a checkpoint that has their AdapterRecord."""


class Held(ABC):
    """A TokenModel on this rank, whole or this rank's shards of it."""

    module: TokenModel
    adapters: AdapterRecord | None
    """Of the module's, if it has any."""

    @abstractmethod
    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As TokenModel.forward, in the compute dtype."""

    @abstractmethod
    def move(self, *, to_host: bool) -> torch.device:
        """Move to host memory, or back to where it computes; the device where an optimiser's state belongs now."""

    @abstractmethod
    def sum_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Sum gradients over ranks, where the backward pass has not done so."""

    @abstractmethod
    def settle(self) -> None:
        """After forward passes that no backward pass followed."""


class ModuleScorer:
    """A Scorer that never learns."""

    def __init__(self, held: Held, settings: Settings) -> None:
        self._held = held
        self._settings = settings
        # Without dropout: the ratio to the behaviour policy has to be 1 when the weights are the same.
        held.module.eval()

    @property
    def model(self) -> PreTrainedModel:
        """What is held, in Hugging Face's own modules."""
        return self._held.module.model

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        scores_P = score_pass(
            rows,
            self._held.forward,
            temperature=temperature,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
            padded=self._held.module.padded,
        )
        self._held.settle()
        return scores_P

    def offload(self) -> None:
        self._held.move(to_host=True)

    def reload(self) -> None:
        self._held.move(to_host=False)


class ModuleBackend(ModuleScorer):
    """A Backend."""

    def __init__(self, held: Held, settings: Settings) -> None:
        super().__init__(held, settings)
        model = held.module
        self._named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._params = list(self._named.values())
        decay = Decay(settings.weight_decay, settings.betas)
        self._optimizer = Optimizer(settings.optimizer, self._named, hidden_matrices(model, _outside(model)), decay)
        self._checkpoint = DistributedCheckpoint()

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        totals = backward_pass(
            rows,
            self._held.forward,
            loss_fn,
            temperature=temperature,
            norm=norm,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
            padded=self._held.module.padded,
        )
        self._held.sum_gradients(self._params)
        total_norm = nn.utils.clip_grad_norm_(self._params, self._settings.max_grad_norm or torch.inf)
        grad_norm = float(whole(total_norm))
        sound = is_sound(totals, grad_norm)
        if sound:
            self._optimizer.step(lr)
        self._optimizer.zero_grad()
        return step_metrics(totals, rows, grad_norm=grad_norm, lr=lr, sound=sound)

    def reset_optimizer(self) -> None:
        self._optimizer.reset()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._checkpoint_names.stream(self._tensors())

    @cached_property
    def _checkpoint_names(self) -> CheckpointNames:
        return CheckpointNames(self.model, names_without(self.model))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By the names that they have in the model."""
        persistent = self.model.state_dict().keys()
        yield from merged(self.model)
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    def save(self, folder: Path) -> Write:
        notes = {ADAPTERS: asdict(self._held.adapters)} if self._held.adapters else {}
        return self._checkpoint.save(folder, self._state(), notes=notes)

    def load(self, folder: Path) -> None:
        if self._held.adapters is not None:
            check_record(folder, notes_of(folder).get(ADAPTERS), self._held.adapters, model=self._settings.path)
        state = self._state()
        self._checkpoint.load(folder, state, model=self._settings.path)
        self._optimizer.take(state)

    def export(self, folder: Path) -> None:
        export_model(self.model, self._tensors(), folder, tokenizer=self._settings.path)

    def export_adapter(self, folder: Path) -> None:
        assert self._settings.lora is not None
        write_adapter(self.model, self._settings.lora, folder, base=self._settings.path)

    def offload(self) -> None:
        self._optimizer.move(self._held.move(to_host=True))

    def reload(self) -> None:
        self._optimizer.move(self._held.move(to_host=False))

    def _state(self) -> dict[str, Tensor]:
        return {**self._named, **self._optimizer.state()}


def _outside(model: TokenModel) -> set[nn.Parameter]:
    """Embeddings and heads."""
    ends = (model.model.get_input_embeddings(), model.model.get_output_embeddings())
    heads = [param for name, param in model.named_parameters() if not name.startswith("model.")]
    return {*heads, *(param for end in ends if end is not None for param in end.parameters())}
