"""Random decoders of the sizes that are measured, and an adapter on one of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.weights.snapshot import Adapter

RANK = 8
BLOCK = 1_000_003
TARGETS = ("q_proj", "v_proj")


@dataclass(frozen=True)
class Size:
    """A shape of Qwen3, tied."""

    name: str
    dtype: str
    """Of the weights as they travel, and of the engine."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


SIZES = {
    size.name: size
    for size in (
        Size("3M", "float32", 2048, 256, 512, 4, 4, 2),
        Size("100M", "float32", 24576, 768, 2304, 12, 12, 4),
        Size("500M", "bfloat16", 32768, 1280, 4096, 23, 20, 5),
    )
}


def make(size: Size, folder: Path) -> dict[str, Tensor]:
    """Write the model; its parameters by name."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype=size.dtype,
    )
    with torch.device("meta"):
        shell: Any = Qwen3ForCausalLM(config)
    block = torch.randn(BLOCK).mul_(0.02).to(getattr(torch, size.dtype))
    weights = {name: _filled(parameter.shape, block) for name, parameter in shell.named_parameters()}
    shell.save_pretrained(folder, state_dict=dict(weights))  # It empties what it is given.
    return weights


def _filled(shape: torch.Size, block: Tensor) -> Tensor:
    """Random numbers, the same again and again: as many fresh ones would take minutes."""
    return block.repeat(-(-shape.numel() // BLOCK))[: shape.numel()].view(shape).clone()


def adapter(weights: Mapping[str, Tensor]) -> Adapter:
    """As peft writes one, on the queries and values of every layer."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1]) * 0.01
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK) * 0.01
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS), "bias": "none"}
    return Adapter(json.dumps(settings).encode(), tensors)


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def change_as_much(weights: Mapping[str, Tensor], budget_bytes: int) -> int:
    """Add to whole tensors of together at most `budget_bytes`, smallest first; how many bytes those are."""
    changed = 0
    for tensor in sorted(weights.values(), key=lambda tensor: tensor.nbytes):
        if changed + tensor.nbytes > budget_bytes:
            break
        tensor.add_(0.01)
        changed += tensor.nbytes
    return changed
