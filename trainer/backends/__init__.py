"""Where the model lives and learns, behind one small collective Protocol.

A new one (FSDP2, DeepSpeed, Megatron) is one file. Losses are handed in, because tensor and pipeline parallelism make
logits local; they are sums, and the caller says what to divide by.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainer.objective import LossFn
from trainer.rows import Row


class Backend(Protocol):
    """The model and its optimiser, complete when constructed.

    Every rank holds one and calls the methods marked *collective* in the same order with the same arguments.
    """

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        """One optimiser step on all `rows`, of which this rank computes its share. Collective.

        Log-probabilities and entropies are of the policy at `temperature`: at the one that engines sampled from, the
        ratio to the behaviour policy is 1 while the weights are the same.

        A step whose loss or gradient is not finite changes nothing and says so: metrics["skipped"] is 1.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forget the optimiser's moments. Collective."""
        ...

    def export_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its Hugging Face name, in a fixed order; a tied head comes under both its names."""
        ...

    def save(self, folder: Path) -> None:
        """Write model and optimiser into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Collective; only rank 0 reads. Raises ConfigError for another model."""
        ...

    def export(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face format."""
        ...
