"""Log-probabilities and entropies of tokens from hidden states, without ever holding all logits.

Logits are made a chunk of positions at a time, and made again in the backward pass when there is more than one chunk.
The head is called as a module, so it may be sharded, gathered by hooks, or wrapped by an adapter. Of a chunk one tensor
of the logits' size is kept for its backward pass, in float32.

Legend: P tokens that are asked for, H hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Most logits of a rank that exist at once: 64 MiB in float32, and a few times that while they are worked on."""

_LEAST = -1e30
"""Taken for the logarithm of 0."""


def token_logprobs(
    head: nn.Module, hidden_PH: Tensor, ids_P: Tensor, *, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """f32[P] log-probability of each token, nats, and f32[P] entropy where it stands, both of softmax(logits /
    temperature) and both with gradient; that of the entropy costs nothing where nobody asks for it.

    hidden_PH   [P, H], from which `head` makes the logits that predict the token
    ids_P       i64, the tokens
    vocabulary  V
    """
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(ids_P) <= size:
        return _of_chunk(head, hidden_PH, ids_P, temperature)
    parts = [
        checkpoint(_of_chunk, head, *chunk, temperature, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden_PH.split(size), ids_P.split(size), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _of_chunk(head: nn.Module, hidden_PH: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return _Picked.apply(head(hidden_PH), ids_P, temperature)


class _Picked(torch.autograd.Function):
    """Logits to log-probabilities of tokens, and entropies.

    With lp = log softmax(z / t), p = exp(lp), l = lp[id] and H = -sum p lp:
    dl/dz = (onehot(id) - p) / t, and dH/dz = -p (lp + H) / t.
    """

    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        lp_PV = torch.log_softmax(logits_PV.float() / temperature, dim=-1)
        logp_P = lp_PV.gather(-1, ids_P[:, None]).squeeze(-1)
        # A word that cannot be has p = 0, and p lp shall be 0 rather than not a number.
        lp_PV.clamp_(min=_LEAST)
        with torch.autocast(logits_PV.device.type, enabled=False):
            entropy_P = -torch.einsum("pv,pv->p", lp_PV.exp(), lp_PV)
        ctx.save_for_backward(lp_PV, ids_P, entropy_P)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits_PV.dtype
        return logp_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, by_logp_P: Tensor | None, by_entropy_P: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        lp_PV, ids_P, entropy_P = ctx.saved_tensors
        if by_logp_P is None and by_entropy_P is None:
            return None, None, None
        by_logp_P = torch.zeros_like(entropy_P) if by_logp_P is None else by_logp_P
        grad_PV = lp_PV.exp()
        if by_entropy_P is None:
            grad_PV.mul_(-by_logp_P[:, None])
        else:
            weight_PV = (lp_PV + entropy_P[:, None]).mul_(by_entropy_P[:, None]).add_(by_logp_P[:, None])
            grad_PV.mul_(weight_PV.neg_())
        grad_PV.scatter_add_(-1, ids_P[:, None], by_logp_P[:, None])
        return grad_PV.div_(ctx.temperature).to(ctx.dtype), None, None
