"""Log-probabilities and entropies where each tensor-parallel rank has some of the logits.

Legend: P tokens, H hidden width, W words of the vocabulary that this rank has.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.backends.logprobs import CHUNK_ELEMENTS

NEVER = -1e9
"""The logit of a word that only pads the vocabulary: finite, for 0 * inf is no number."""


def logp_and_entropy(
    head: ColumnParallelLinear,
    ranks: dist.ProcessGroup,
    weight: Tensor | None,
    hidden_PH: Tensor,
    ids_P: Tensor,
    *,
    vocabulary: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """f32[P] on each of the ranks that share the head. `weight` is the head's where it is the embedding; `vocabulary`
    is that without padding.

    Logits are made a chunk of tokens at a time, and again in the backward pass when there is more than one chunk.
    """
    size = max(1, CHUNK_ELEMENTS // head.output_size_per_partition)
    if len(ids_P) <= size:
        return _chunk(head, ranks, weight, hidden_PH, ids_P, vocabulary, temperature)
    parts = [
        checkpoint(
            _chunk, head, ranks, weight, *chunk, vocabulary, temperature, use_reentrant=False, preserve_rng_state=False
        )
        for chunk in zip(hidden_PH.split(size), ids_P.split(size), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _chunk(
    head: ColumnParallelLinear,
    ranks: dist.ProcessGroup,
    weight: Tensor | None,
    hidden_PH: Tensor,
    ids_P: Tensor,
    vocabulary: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    first = ranks.rank() * head.output_size_per_partition
    logits_PW = head(hidden_PH[:, None], weight=weight)[0][:, 0].float() / temperature
    if (padding := first + logits_PW.shape[1] - vocabulary) > 0:
        columns = torch.arange(logits_PW.shape[1], device=logits_PW.device)
        logits_PW = logits_PW.masked_fill(columns >= logits_PW.shape[1] - padding, NEVER)
    with torch.no_grad():
        greatest_P = logits_PW.amax(-1)
        dist.all_reduce(greatest_P, dist.ReduceOp.MAX, group=ranks)
    shifted_PW = logits_PW - greatest_P[:, None]
    weight_PW = shifted_PW.exp()
    is_mine_P = (ids_P >= first) & (ids_P < first + logits_PW.shape[1])
    places_P = torch.where(is_mine_P, ids_P - first, 0)
    picked_P = shifted_PW.gather(-1, places_P[:, None])[:, 0] * is_mine_P
    sums_KP = torch.stack([weight_PW.sum(-1), (weight_PW * shifted_PW).sum(-1), picked_P])
    total_P, weighted_P, picked_P = reduce_from_tensor_model_parallel_region(sums_KP, group=ranks)
    return picked_P - total_P.log(), total_P.log() - weighted_P / total_P
