"""Models to folders in Hugging Face format, whatever held them."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from trainer.backends.passes import rank


def export_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, tokenizer: str
) -> None:
    """Write the tensors, by their Hugging Face names, as a model of this one's class, with its tokenizer. Collective;
    rank 0 writes, and holds all of them in host memory meanwhile."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if rank() == 0:
            whole[name] = tensor.detach().to("cpu", copy=True)
    if rank() > 0:
        return
    with torch.device("meta"):
        shell = type(model)(model.config)
    shell.generation_config = model.generation_config
    shell.save_pretrained(folder, state_dict=whole)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
