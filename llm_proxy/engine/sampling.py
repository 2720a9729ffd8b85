"""Turns logits into tokens and the log-probabilities of the distribution that they were drawn from.

A draw is a pure function of (seed, position in the sequence), so it depends neither on the batch nor on the engine: a
request that continues elsewhere from its tokens draws what it would have drawn here.

Shapes: B rows, V vocabulary, K likeliest tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm_proxy.engine.requests import Request
from llm_proxy.engine.stepping import Sampled


def sample(logits_BV: Tensor, requests: Sequence[Request], seeds: Sequence[int], positions: Sequence[int]) -> Sampled:
    """Draw the token at `positions[b]` of each row. Temperature comes first, then top_k, then top_p."""
    logp_BV = torch.log_softmax(_process(logits_BV.float(), requests), dim=-1)
    chosen_B = _draw(logp_BV, uniforms(seeds, positions))
    greedy = [b for b, request in enumerate(requests) if request.temperature == 0]
    if greedy:
        chosen_B[greedy] = logp_BV[greedy].argmax(dim=-1)
    chosen_logp_B = logp_BV.gather(1, chosen_B[:, None])[:, 0]
    return Sampled(chosen_B.tolist(), chosen_logp_B.tolist(), _likeliest(logp_BV, requests))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """[B] numbers in [0, 1), each a hash of its seed and position (two rounds of splitmix64)."""
    with np.errstate(over="ignore"):
        seed_B = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
        position_B = np.array(positions, dtype=np.uint64)
        mixed = _splitmix(_splitmix(seed_B) + position_B * np.uint64(0xD1B5_4A32_D192_ED03))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def _process(logits_BV: Tensor, requests: Sequence[Request]) -> Tensor:
    if all(r.temperature in (0, 1) and (r.temperature == 0 or _keeps_all(r)) for r in requests):
        return logits_BV
    temperature_B = torch.tensor([request.temperature or 1.0 for request in requests], device=logits_BV.device)
    logits_BV = logits_BV / temperature_B[:, None]
    for b, request in enumerate(requests):
        if request.temperature > 0 and not _keeps_all(request):
            logits_BV[b] = _truncate(logits_BV[b], request.top_k, request.top_p)
    return logits_BV


def _keeps_all(request: Request) -> bool:
    return request.top_k == 0 and request.top_p == 1


def _truncate(logits_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Minus infinity for all but the top_k likeliest, of which for all but the fewest whose mass reaches top_p."""
    ordered_V, ids_V = logits_V.sort(descending=True, stable=True)
    if top_k:
        ordered_V[top_k:] = -torch.inf
    if top_p < 1:
        probs_V = ordered_V.softmax(dim=-1)
        ordered_V[probs_V.cumsum(dim=-1) - probs_V >= top_p] = -torch.inf
    return torch.empty_like(logits_V).scatter_(0, ids_V, ordered_V)


def _draw(logp_BV: Tensor, u_B: NDArray[np.float64]) -> Tensor:
    """Invert the cumulative distribution. A token without probability has no interval and is never drawn."""
    cdf_BV = logp_BV.double().exp().cumsum(dim=-1)
    target_B = torch.from_numpy(u_B).to(cdf_BV.device) * cdf_BV[:, -1]
    chosen_B = torch.searchsorted(cdf_BV, target_B[:, None], right=True)[:, 0]
    return chosen_B.clamp_(max=logp_BV.shape[1] - 1)


def _likeliest(logp_BV: Tensor, requests: Sequence[Request]) -> list[tuple[list[int], list[float]] | None]:
    width = max(request.top_logprobs for request in requests)
    if width == 0:
        return [None] * len(requests)
    logp_BK, ids_BK = logp_BV.topk(width, dim=-1)
    return [
        (ids[: request.top_logprobs], logprobs[: request.top_logprobs]) if request.top_logprobs else None
        for request, ids, logprobs in zip(requests, ids_BK.tolist(), logp_BK.tolist(), strict=True)
    ]
