"""Log-probabilities and entropies of tokens from hidden states, without ever holding all logits.

Logits are made a chunk of positions at a time, and made again in the backward pass when there is more than one chunk.
The head is called as a module, so it may be sharded, gathered by hooks, or wrapped by an adapter. Of a chunk one tensor
of the logits' size is kept for its backward pass, in float32: the probabilities.

Legend: P tokens that are asked for, H hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Most logits that exist at once: 64 MiB in float32, and a few times that while they are worked on."""


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

    With p = softmax(z / t), l = log p[id] and H = -sum p log p:
    dl/dz = (onehot(id) - p) / t, and dH/dz = -p (log p + H) / t.
    """

    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled_PV = logits_PV.float() / temperature
        normalizer_P = torch.logsumexp(scaled_PV, dim=-1)
        logp_P = scaled_PV.gather(-1, ids_P[:, None]).squeeze(-1) - normalizer_P
        p_PV = scaled_PV.sub_(normalizer_P[:, None]).exp_()
        entropy_P = torch.special.entr(p_PV).sum(-1)
        ctx.save_for_backward(p_PV, ids_P, entropy_P)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits_PV.dtype
        return logp_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        p_PV, ids_P, entropy_P = ctx.saved_tensors
        by_logp_P, by_entropy_P = grads
        grad_PV: Tensor | None = None
        if by_entropy_P is not None:
            grad_PV = torch.special.entr(p_PV).addcmul_(p_PV, entropy_P[:, None], value=-1).mul_(by_entropy_P[:, None])
        if by_logp_P is not None:
            by_p_PV = p_PV * -by_logp_P[:, None]
            by_p_PV.scatter_add_(-1, ids_P[:, None], by_logp_P[:, None])
            grad_PV = by_p_PV if grad_PV is None else grad_PV.add_(by_p_PV)
        if grad_PV is None:
            return None, None, None
        return grad_PV.div_(ctx.temperature).to(ctx.dtype), None, None
