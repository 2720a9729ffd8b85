"""Models to folders in Hugging Face format, whatever held them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from rollfarm import images
from trainer.backends.alone import on_rank_0
from trainer.backends.passes import rank
from trainer.backends.unwrapped import unwrapped
from trainer.checkpoints import sync_tree
from trainer.disk import os_errors

FILE_SIZE = "5GB"
"""Most that goes into one file. While one is written safetensors lets no other thread run, so no sign of life either:
see trainer.backends.alone."""


def export_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, tokenizer: str
) -> None:
    """Write the tensors, by the names that they have in `model`, as its checkpoint, with its tokenizer. Collective;
    rank 0 writes, and holds all of them in host memory meanwhile."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if rank() == 0:
            whole[name] = tensor.detach().to("cpu", copy=True)

    def write() -> None:
        with torch.device("meta"):
            shell = type(model)(model.config)
        shell.generation_config = model.generation_config
        with unwrapped():
            shell.save_pretrained(folder, state_dict=whole, max_shard_size=FILE_SIZE)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
        if (eyes := images.load(tokenizer)) is not None:
            eyes.save(folder)

    write_on_rank_0(folder, write)


def write_on_rank_0(folder: Path, write: Callable[[], None]) -> None:
    """Fill the folder and have it on disk, while the other ranks wait. Collective. Raises OSError, on rank 0 alone."""

    def fill() -> None:
        with os_errors():
            write()
        sync_tree(folder)

    on_rank_0(fill)
