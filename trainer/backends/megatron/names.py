"""Megatron's parameters by the names and shapes that Hugging Face gives them.

Megatron fuses what one multiplication can make: queries, keys and values group by group, the gate on top of the up
projection. Taken apart again, a tensor-parallel rank's share is always a contiguous block of each Hugging Face tensor,
so a share needs no other rank to be read, written or named. Gradients and an optimiser's moments have the shapes of
their parameters and go the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.backends.megatron.architecture import Architecture

Form = Literal["plain", "stacked", "grouped"]
"""How the Hugging Face tensors lie in Megatron's: alone, one above the other, or interleaved by key-value head."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of Hugging Face's, and how tensor-parallel ranks share it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""

    axis: int | None
    """The axis along which ranks have consecutive blocks, as even as torch.chunk makes them. None: each has all."""

    def block(self, rank: int, size: int) -> tuple[slice, ...]:
        """Where rank `rank` of `size` has its share."""
        whole = [slice(0, length) for length in self.shape]
        if self.axis is not None:
            length = self.shape[self.axis]
            each = -(-length // size)
            whole[self.axis] = slice(min(length, rank * each), min(length, (rank + 1) * each))
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of Megatron's, as a stage of the pipeline has it."""

    name: str
    """In Megatron's module, whose layers count from the stage's first."""

    parts: tuple[Part, ...]
    form: Form = "plain"
    expert: int | None = None
    """Of the whole model, where the parameter is one expert's."""

    def take_apart(self, tensor: Tensor, arch: Architecture, rank: int, size: int) -> list[Tensor]:
        """This rank's block of each part, out of its share of the parameter."""
        match self.form:
            case "grouped":
                groups, each = arch.groups // size, arch.heads // arch.groups
                by_group = tensor.reshape(groups, each + 2, arch.head_dim, *tensor.shape[1:])
                pieces = by_group.split([each, 1, 1], dim=1)
                return [piece.reshape(-1, *tensor.shape[1:]) for piece in pieces]
            case "stacked":
                return list(tensor.chunk(len(self.parts)))
            case "plain":
                # Megatron pads the vocabulary until it divides by the ranks.
                return [tensor[tuple(slice(each.stop - each.start) for each in self.parts[0].block(rank, size))]]

    def put_together(self, blocks: Sequence[Tensor], arch: Architecture, rows: int, size: int) -> Tensor:
        """This rank's share of the parameter, `rows` long, out of its block of each part."""
        match self.form:
            case "grouped":
                shape = (arch.groups // size, -1, arch.head_dim, *blocks[0].shape[1:])
                return torch.cat([block.reshape(shape) for block in blocks], dim=1).reshape(rows, *blocks[0].shape[1:])
            case "stacked":
                return torch.cat(list(blocks))
            case "plain":
                block = blocks[0]
                padding = block.new_zeros(rows - len(block), *block.shape[1:])
                return torch.cat([block, padding]) if len(padding) else block


@dataclass(frozen=True, slots=True)
class Share:
    """What of the model a rank holds."""

    stage: int
    stages: int
    expert_rank: int = 0
    expert_ranks: int = 1

    def layers(self, arch: Architecture) -> range:
        """Of the whole model."""
        each = arch.layers // self.stages
        return range(self.stage * each, (self.stage + 1) * each)

    def experts(self, arch: Architecture) -> range:
        """Of each layer."""
        each = arch.experts // self.expert_ranks
        return range(self.expert_rank * each, (self.expert_rank + 1) * each)


def parameters(arch: Architecture, share: Share) -> Iterator[Parameter]:
    """Those of a share, in the order of Hugging Face's names."""
    table = (arch.vocabulary, arch.hidden)
    if share.stage == 0:
        yield Parameter("embedding.word_embeddings.weight", (Part(EMBEDDING, table, 0),))
    for index, layer in enumerate(share.layers(arch)):
        yield from _attention(arch, f"decoder.layers.{index}.", f"model.layers.{layer}.")
        if arch.experts:
            yield from _mixture(arch, f"decoder.layers.{index}.", f"model.layers.{layer}.", share.experts(arch))
        else:
            yield from _feed_forward(arch, f"decoder.layers.{index}.mlp.", f"model.layers.{layer}.mlp.", expert=None)
    if share.stage == share.stages - 1:
        yield Parameter("decoder.final_layernorm.weight", (Part("model.norm.weight", (arch.hidden,), None),))
        if not arch.tied:
            yield Parameter("output_layer.weight", (Part(HEAD, table, 0),))
        elif share.stages > 1:
            yield Parameter("output_layer.weight", (Part(EMBEDDING, table, 0),))


def whole(arch: Architecture) -> Iterator[Parameter]:
    """Every parameter of the model, once."""
    return parameters(arch, Share(0, 1))


def _attention(arch: Architecture, ours: str, theirs: str) -> Iterator[Parameter]:
    hidden, attention = arch.hidden, theirs + "self_attn."
    widths = {"q": arch.heads * arch.head_dim, "k": arch.groups * arch.head_dim, "v": arch.groups * arch.head_dim}
    yield _norm(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", hidden)
    weights = tuple(Part(f"{attention}{name}_proj.weight", (width, hidden), 0) for name, width in widths.items())
    yield Parameter(ours + "self_attention.linear_qkv.weight", weights, "grouped")
    if arch.qkv_bias:
        biases = tuple(Part(f"{attention}{name}_proj.bias", (width,), 0) for name, width in widths.items())
        yield Parameter(ours + "self_attention.linear_qkv.bias", biases, "grouped")
    if arch.qk_norm:
        yield _norm(ours + "self_attention.q_layernorm.weight", attention + "q_norm.weight", arch.head_dim)
        yield _norm(ours + "self_attention.k_layernorm.weight", attention + "k_norm.weight", arch.head_dim)
    output = Part(attention + "o_proj.weight", (hidden, widths["q"]), 1)
    yield Parameter(ours + "self_attention.linear_proj.weight", (output,))
    yield _norm(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight", hidden)


def _mixture(arch: Architecture, ours: str, theirs: str, experts: range) -> Iterator[Parameter]:
    router = Part(theirs + "mlp.gate.weight", (arch.experts, arch.hidden), None)
    yield Parameter(ours + "mlp.router.weight", (router,))
    for index, expert in enumerate(experts):
        local = f"{ours}mlp.experts.local_experts.{index}."
        yield from _feed_forward(arch, local, f"{theirs}mlp.experts.{expert}.", expert=expert)


def _feed_forward(arch: Architecture, ours: str, theirs: str, *, expert: int | None) -> Iterator[Parameter]:
    inner = (arch.feed_forward, arch.hidden)
    gate_up = tuple(Part(f"{theirs}{name}_proj.weight", inner, 0) for name in ("gate", "up"))
    yield Parameter(ours + "linear_fc1.weight", gate_up, "stacked", expert)
    yield Parameter(ours + "linear_fc2.weight", (Part(theirs + "down_proj.weight", inner[::-1], 1),), "plain", expert)


def _norm(ours: str, theirs: str, width: int) -> Parameter:
    return Parameter(ours, (Part(theirs, (width,), None),))
