"""What a Hugging Face model is made of, as far as the megatron backend knows how to build it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollfarm.config import ConfigError
from trainer.backend_config import MegatronConfig

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types of Hugging Face that can be built."""

FIXED_ROPES = ("default", "linear", "llama3")
"""Kinds of rotary embeddings whose frequencies do not depend on the row."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of the Llama family: RMSNorm, rotary attention, gated SiLU feed-forward layers or a mixture of them."""

    layers: int
    hidden: int
    heads: int
    groups: int
    """Key-value heads; each serves heads / groups query heads."""

    head_dim: int
    feed_forward: int
    """Inner width of a layer, or of one expert."""

    vocabulary: int
    norm_eps: float
    tied: bool
    """Whether the output head is the embedding."""

    padding: int | None = None
    """The word that only pads, if there is one: its embedding is never learnt."""

    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised, head by head."""

    experts: int = 0
    """In each layer. 0 is a dense model."""

    experts_per_token: int = 0
    renormalized: bool = True
    """Whether the weights of a token's experts sum to 1."""


def read_config(path: str) -> PretrainedConfig:
    """Of a folder, or a name of the hub. Raises ConfigError."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Raises ConfigError for a model that the megatron backend cannot build exactly."""
    if config.model_type not in SUPPORTED:
        raise _unsupported(f"model type {config.model_type!r}")
    _refuse_variants(config)
    heads = int(config.num_attention_heads)
    experts = int(config.num_experts) if config.model_type == "qwen3_moe" else 0
    return Architecture(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        groups=int(config.num_key_value_heads or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        feed_forward=int(config.moe_intermediate_size if experts else config.intermediate_size),
        vocabulary=int(config.vocab_size),
        norm_eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        padding=config.pad_token_id,
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type.startswith("qwen3"),
        experts=experts,
        experts_per_token=int(config.num_experts_per_tok) if experts else 0,
        renormalized=bool(config.norm_topk_prob) if experts else True,
    )


def check_fits(arch: Architecture, config: MegatronConfig) -> None:
    """Raises ConfigError where the sizes do not divide the model."""
    sizes = {
        "tensor_parallel": (config.tensor_parallel, {"key-value heads": arch.groups, "inner width": arch.feed_forward}),
        "pipeline_parallel": (config.pipeline_parallel, {"layers": arch.layers}),
        "expert_parallel": (config.expert_parallel, {"experts": arch.experts}),
    }
    for name, (size, counts) in sizes.items():
        for what, count in counts.items():
            if size > 1 and (count == 0 or count % size):
                raise ConfigError(
                    f"trainer.megatron.{name}: {size} does not divide the model's {what} ({count}). Choose a divisor."
                )
    if arch.experts and config.tensor_parallel > 1 and not config.sequence_parallel:
        raise ConfigError(
            "trainer.megatron.sequence_parallel: a mixture of experts that is cut by tensor_parallel needs it. Set it."
        )


def rotary_frequencies(config: PretrainedConfig) -> Tensor:
    """f32[head_dim / 2], radians per position. Raises ConfigError for a kind that changes with the row."""
    rope: Mapping[str, Any] = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in FIXED_ROPES:
        raise _unsupported(f"rotary embeddings of type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("rotary embeddings of a part of each head")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].float()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _refuse_variants(config: PretrainedConfig) -> None:
    """Settings that would change the function, or lie where a config of the family may have them."""
    if config.hidden_act != "silu":
        raise _unsupported(f"activation {config.hidden_act!r}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise _unsupported("a model with biases (attention_bias, mlp_bias)")
    kinds = getattr(config, "layer_types", None)
    if set(kinds) != {"full_attention"} if kinds else getattr(config, "sliding_window", None) is not None:
        raise _unsupported("sliding-window attention")
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise _unsupported("a mixture that leaves some layers dense")


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"model.path: the megatron backend does not know {what}. It builds {', '.join(SUPPORTED)} with full attention; "
        "choose such a model, or another trainer.backend."
    )
