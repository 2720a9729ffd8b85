"""Parts of a decoder layer that Megatron-Core has for CUDA alone, or not for packed rows."""

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from trainer.backends.megatron.packing import places_of

# Where Transformer Engine is not installed, a router asks whether this name is None, and nobody has set it.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank then sees its own positions, and gradients are summed over the tensor-parallel ones.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


class PackedAttention(nn.Module):
    """Causal attention within each row of a pack; with context parallelism, to keys and values of all ranks."""

    def __init__(self, *, pg_collection: ProcessGroupCollection | None, **_: object) -> None:
        super().__init__()
        assert pg_collection is not None
        self._ranks = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, /, **_: object
    ) -> Tensor:
        """[T, 1, heads * width] from [T, 1, heads, width]; `attention_mask` is the lengths of the rows."""
        assert attention_mask is not None
        lengths: list[int] = attention_mask.tolist()
        size, rank = self._ranks.size(), self._ranks.rank()
        if size > 1:
            key, value = (_of_all_ranks(each, lengths, self._ranks) for each in (key, value))
        attended: list[Tensor] = []
        start = local = 0
        for length in lengths:
            each = length // (2 * size) if size > 1 else length
            for chunk in (rank, 2 * size - 1 - rank) if size > 1 else (0,):
                keys = slice(start, start + (chunk + 1) * each)
                attended.append(_attend(query[local : local + each, 0], key[keys, 0], value[keys, 0]))
                local += each
            start += length
        return torch.cat(attended).flatten(1)[:, None]


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, heads, width] from the last T positions of a row to all before them."""
    before = len(key) - len(query)
    mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(before) if before else None
    heads_first = [each.transpose(0, 1)[None] for each in (query, key, value)]
    found = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=not before, enable_gqa=True)
    return found[0].transpose(0, 1)


def _of_all_ranks(tensor: Tensor, lengths: list[int], ranks: torch.distributed.ProcessGroup) -> Tensor:
    """Every position, in the order of the rows. Its gradient is summed over the ranks that looked there."""
    gathered = gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True, group=ranks)
    places = np.concatenate([places_of(lengths, rank, ranks.size()) for rank in range(ranks.size())])
    return gathered[torch.as_tensor(places.argsort(), device=tensor.device)]
