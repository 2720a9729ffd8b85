"""The model beside its inference server: the shapes that both have to agree on, and the values that it begins with."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.receiver import Allocate, Staged
from llm_proxy.engine.requests import Limits
from rollfarm import images
from rollfarm.checkpoint_names import CheckpointNames
from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig

SEEN_BY = {"vllm": images.MODEL_TYPES, "sglang": ("qwen2_5_vl", "qwen3_vl")}
"""Architectures whose images an adapter's server takes. SGLang resizes those of Qwen2-VL by a rule of its own."""

_ALIGN_BYTES = 64


def model_shapes(model: ModelConfig, config: EngineConfig) -> tuple[dict[str, Tensor], Limits]:
    """The model's tensors without values, under all of their names, and its limits. Raises ConfigError."""
    try:
        hf_config: Any = AutoConfig.from_pretrained(model.path)
        with torch.device("meta"):
            skeleton = images.auto_class(hf_config.model_type).from_config(hf_config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model.path} cannot be loaded: {error}") from error
    text = hf_config.get_text_config()
    most: int = text.max_position_embeddings
    if config.context_tokens > most:
        raise ConfigError(
            f"engine.context_tokens: {config.context_tokens} is more than the model's {most}. Lower it, or set 0."
        )
    sees = hf_config.model_type in SEEN_BY.get(config.adapter, ())
    image_token_id: int | None = hf_config.image_token_id if sees else None
    limits = Limits(config.slots, config.context_tokens or most, text.vocab_size, image_token_id)
    return CheckpointNames(skeleton).shapes(skeleton.state_dict(keep_vars=True)), limits


def base_weights(model: ModelConfig, allocate: Allocate) -> Staged:
    """Version 0, read from the model's folder into memory of `allocate`."""
    auto = images.auto_class(AutoConfig.from_pretrained(model.path).model_type)
    loaded: Any = auto.from_pretrained(model.path, dtype=getattr(torch, model.dtype))
    tensors = dict(CheckpointNames(loaded).stream(loaded.named_parameters()))
    places = list(accumulate((_aligned(tensor.nbytes) for tensor in tensors.values()), initial=0))
    memory = allocate(places[-1])
    views: list[tuple[str, Tensor]] = []
    for (name, tensor), place in zip(tensors.items(), places, strict=False):
        view = memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        views.append((name, view.copy_(tensor.detach())))
    return Staged(0, views, memory)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
