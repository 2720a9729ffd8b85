"""Where models live and learn, behind one small collective Protocol.

A backend is one file. Losses are handed in, because tensor and pipeline parallelism make logits local; they are sums,
and the caller says what to divide by.

Every rank holds each model and calls every method in the same order with the same arguments: all are collective. What
is returned is the same on every rank, unless a method says otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from trainer.backend_config import LoraConfig, OptimizerName
from trainer.objective import LossFn
from trainer.rows import Row

WRITE_TIMEOUT = timedelta(hours=2)
"""How long ranks wait for each other to have written their parts of a checkpoint."""

Write = Callable[[], None]
"""Writes what was copied; may run in another thread while training goes on. Raises OSError where there is no room."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every backend is told."""

    path: str
    """The model, in Hugging Face format: a folder, or a name of the hub."""

    device: torch.device
    """Of this rank."""

    compute_dtype: torch.dtype = torch.float32
    """Of forward and backward passes; master weights are float32."""

    micro_batch_tokens: int = 8192
    """Most tokens of one forward pass."""

    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm. 0 never scales."""

    optimizer: OptimizerName = "adamw"
    """What turns gradients into steps."""

    weight_decay: float = 0.0
    """Decoupled decay of matrices."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's moments."""

    packing: bool = True
    """Whether rows go through a model end to end, where its architecture allows it."""

    lora: LoraConfig | None = None
    """The adapters that learn in place of the model, if any."""

    seed: int = 0
    """Seeds what is random in the model's beginning."""


class Scorer(Protocol):
    """A model that is asked about tokens: the policy, a frozen reference or teacher, or a critic."""

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        """f32[P] on the CPU: of each token that the policy wrote in `rows`, in their order, its log-probability at
        `temperature`; or what the critic expects before it, in units of reward."""
        ...

    def offload(self) -> None:
        """Move everything from the accelerator to host memory."""
        ...

    def reload(self) -> None:
        """Move everything back."""
        ...


class Backend(Scorer, Protocol):
    """A model that learns, and its optimiser; complete when constructed."""

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        """One optimiser step on all `rows`, of which this rank computes its share.

        Log-probabilities and entropies are of the policy at `temperature`: at the one that engines sampled from, the
        ratio to the behaviour policy is 1 while the weights are the same.

        A step whose loss or gradient is not finite changes nothing and says so: metrics["skipped"] is 1.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forget the optimiser's moments."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor as a checkpoint of this architecture on the hub has it, in a fixed order; a tied head comes
        under both its names. Each rank has to exhaust it, and only rank 0 may look at the tensors. A tensor is good
        until the next one is asked for."""
        ...

    def save(self, folder: Path) -> Write:
        """Copy model and optimiser, to be written into an existing folder that every rank sees."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what was written there, by as many ranks as there are or by others. Raises ConfigError for another
        model."""
        ...

    def export(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face format into an existing folder, and have them on disk. The ranks
        wait for rank 0, however long it writes. Raises OSError, on rank 0 alone."""
        ...


@runtime_checkable
class AdapterBackend(Backend, Protocol):
    """A Backend that may have adapters."""

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters alone into an existing folder, in peft's format: adapter_config.json and
        adapter_model.safetensors."""
        ...
