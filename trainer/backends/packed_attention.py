"""Attention over rows that lie end to end, with nothing between them and no mask over all of them.

It is told of rows as flash attention is in transformers: `cu_seq_lens_q`, `max_length_q` and `sliding_window` are
arguments that a model hands on to its attention function. So they pass activation checkpointing, sharding and adapters
like any other argument. Nothing is kept between calls but what rollfarm.last_layer was asked for last: attention runs
before what needs it, in the same thread.

Legend: 1 the batch dimension, T positions of all rows, L of one row, N rows of one length, A heads, D their width.
"""

import inspect
from itertools import groupby
from typing import Any, cast

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollfarm.last_layer import spare

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch is older than 2.10
    varlen_attn = None
if varlen_attn is not None and "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # older than 2.12
    varlen_attn = None

log = structlog.get_logger()

NAME = "rollfarm_packed"
"""Of this attention, in transformers' registry."""

_PLAIN_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}
_DROPS_LENGTHS = {"moshi", "nemotron"}
"""Models whose layers do not hand on to attention what it is told."""

_HALF = (torch.bfloat16, torch.float16)


def pack(model: PreTrainedModel) -> bool:
    """Let the model take rows end to end, if it can. Otherwise it stays as it is, and the log says why."""
    if (reason := why_not(model)) is not None:
        log.warning("rows are padded", model=type(model).__name__, reason=reason)
        return False
    # A vision tower's attention is not causal, and cuts its own images apart.
    has_tower = hasattr(model.config, "vision_config")
    model.set_attn_implementation({"text_config": NAME, "vision_config": "sdpa"} if has_tower else NAME)
    spare(model)
    return True


def is_packed(model: PreTrainedModel) -> bool:
    """Whether it takes rows end to end."""
    return model.config.get_text_config()._attn_implementation == NAME


def why_not(model: PreTrainedModel) -> str | None:
    """What of the model would be wrong with rows end to end; None if nothing."""
    config = model.config.get_text_config()
    told = all(getattr(model, name, False) for name in ("_supports_attention_backend", "_supports_flash_attn"))
    if not told or config.model_type in _DROPS_LENGTHS:
        return "its attention cannot be told where rows end"
    others = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if others or getattr(model, "_is_stateful", False):
        return f"layers other than attention would carry one row into the next: {', '.join(sorted(others)) or 'state'}"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps the logits of its attention"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None


def lengths_for(lengths_R: Tensor, longest: int) -> dict[str, Any]:
    """What the model has to be called with, beside ids and positions, so that its attention knows the rows."""
    ends_R = F.pad(lengths_R.cumsum(0), (1, 0)).to(torch.int32)
    return {"cu_seq_lens_q": ends_R, "cu_seq_lens_k": ends_R, "max_length_q": longest, "max_length_k": longest}


def packed_attention(
    module: nn.Module,
    query_1ATD: Tensor,
    key_1ATD: Tensor,
    value_1ATD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, T, A, D], as transformers wants it. Causal within each row, and no further back than the sliding window."""
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} wants {name}: set trainer.packing to false.")
    several = False
    if attention_mask is not None and attention_mask.ndim == 1:
        # Not every model that has a sliding window says so to its attention.
        several, sliding_window = bool(attention_mask[0]), int(attention_mask[1]) or None
        attention_mask = None
    if cu_seq_lens_q is None and several:
        raise NotImplementedError(f"{type(module).__name__} was not told where rows end: set trainer.packing to false.")
    if cu_seq_lens_q is None or attention_mask is not None:
        # Somebody calls the model as it is: without padding, with it, or with a cache.
        length = query_1ATD.shape[2]
        if attention_mask is None and sliding_window is not None and sliding_window < length == key_1ATD.shape[2]:
            attention_mask = _band(length, sliding_window, query_1ATD.device)[None, None]
        return sdpa_attention_forward(
            module, query_1ATD, key_1ATD, value_1ATD, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    kind = query_1ATD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_1ATD.dtype
    if varlen_attn is None or kind != "cuda" or dtype not in _HALF or query_1ATD.shape[-1] != value_1ATD.shape[-1]:
        return _row_by_row(query_1ATD, key_1ATD, value_1ATD, cu_seq_lens_q, window, dropout, scaling), None
    # Rotary embeddings have made float32 of what autocast had in half precision.
    query_TAD, key_TAD, value_TAD = (each[0].transpose(0, 1).to(dtype) for each in (query_1ATD, key_1ATD, value_1ATD))
    out_TAD = varlen_attn(
        query_TAD,
        key_TAD,
        value_TAD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_TAD.shape[1] != key_TAD.shape[1],
    )
    return cast(Tensor, out_TAD)[None], None


def _row_by_row(
    query_1ATD: Tensor,
    key_1ATD: Tensor,
    value_1ATD: Tensor,
    cu_seq_lens_q: Tensor,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """One call for each run of rows that are equally long: micro-batches have such rows side by side."""
    runs = [(length, len(list(run))) for length, run in groupby(cu_seq_lens_q.diff().tolist())]
    sizes = [length * count for length, count in runs]
    # Cut all at once: the gradient of a piece that is cut out by itself is as large as the whole.
    parts = zip(*(each.squeeze(0).split(sizes, dim=1) for each in (query_1ATD, key_1ATD, value_1ATD)), strict=True)
    outs_TAD: list[Tensor] = []
    for (length, count), part in zip(runs, parts, strict=True):
        query_NALD, key_NALD, value_NALD = (each.unflatten(1, (count, length)).transpose(0, 1) for each in part)
        band = None if window is None or length <= window else _band(length, window, query_NALD.device)
        out_NALD = F.scaled_dot_product_attention(
            query_NALD,
            key_NALD,
            value_NALD,
            attn_mask=band,
            dropout_p=dropout,
            is_causal=band is None,
            scale=scaling,
            enable_gqa=query_NALD.shape[1] != key_NALD.shape[1],
        )
        outs_TAD.append(out_NALD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs_TAD)[None]


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool[L, L], true from a position to itself and the window - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def _mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    **others: Any,
) -> Tensor | None:
    """Instead of a mask (whether positions begin anew somewhere, the sliding window or 0), both of which transformers
    finds out; None, where neither is. Padding, or what a model adds to the causal mask, makes a mask as ever: right,
    and slow."""
    if attention_mask is not None or use_vmap:
        settings = {"allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap, "local_size": local_size}
        return sdpa_mask(attention_mask=attention_mask, **settings, **others)
    if allow_is_causal_skip and local_size is None:
        return None
    return torch.tensor([not allow_is_causal_skip, local_size or 0], dtype=torch.int64)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)
