"""Attention over a KV cache of slots, for any transformers model that takes an attention function.

A forward pass is one packed row of N tokens: the segments of many sequences side by side, without padding. Everything
but attention works on tokens alone. Attention writes the new keys and values into the pool, token-major, and then lets
each segment look at its own row of the pool only.

Shapes: R rows, T tokens of context, N tokens of the pass, B segments of one token, H heads, K heads of keys, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "rollfarm_slots"
"""What `attn_implementation` calls it."""


@dataclass(slots=True)
class Layer:
    """Keys and values of one layer."""

    keys_RTKD: Tensor
    values_RTKD: Tensor


class Probe:
    """Stands in for a Pass once, to learn the shapes of a model's keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int], torch.dtype]] = {}
        """By layer: (K, D) of the keys and of the values, and their dtype."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        self.shapes[int(module.layer_idx)] = (  # pyright: ignore[reportArgumentType]
            (key.shape[1], key.shape[3]),
            (value.shape[1], value.shape[3]),
            key.dtype,
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


@dataclass(slots=True)
class _Long:
    """A segment of several tokens."""

    first: int
    last: int
    row: int
    cached: int
    """Tokens of the row that were there before."""

    mask: Tensor | None
    """[tokens, cached + tokens] added to the scores; None at a sequence's beginning, which is plainly causal."""


class Pass:
    """Where the tokens of one forward pass belong: segments of one token first, then longer ones."""

    def __init__(
        self,
        layers: Sequence[Layer],
        segments: Sequence[tuple[int, int, int]],
        *,
        device: torch.device,
    ) -> None:
        """`segments`: (row, tokens already there, new tokens)."""
        self._layers = layers
        context = layers[0].keys_RTKD.shape[1]
        positions: list[int] = []
        targets: list[int] = []
        self._long: list[_Long] = []
        self._single_count = sum(count == 1 for _, _, count in segments)
        for row, start, count in segments:
            first = len(positions)
            positions.extend(range(start, start + count))
            targets.extend(range(row * context + start, row * context + start + count))
            if count > 1:
                mask = None if start == 0 else _causal(start, count, None, device)
                self._long.append(_Long(first, first + count, row, start, mask))
        self.position_ids_1N = torch.tensor([positions], device=device)
        self._targets_N = torch.tensor(targets, device=device)
        self._device = device
        if self._single_count:
            self._plan_singles([(row, start) for row, start, _ in segments[: self._single_count]])

    def _plan_singles(self, singles: Sequence[tuple[int, int]]) -> None:
        """Look at one stretch of rows where they lie close together, which copies nothing; gather them otherwise."""
        rows = [row for row, _ in singles]
        low, high = min(rows), max(rows) + 1
        self._span = (low, high) if high - low <= 2 * len(rows) else None
        self._rows_B = torch.tensor(rows, device=self._device)
        self._length = max(start for _, start in singles) + 1
        ends = torch.zeros(high - low if self._span else len(rows), dtype=torch.long, device=self._device)
        places = self._rows_B - low if self._span else torch.arange(len(rows), device=self._device)
        ends[places] = torch.tensor([start + 1 for _, start in singles], device=self._device)
        self._places_B = places
        self._dense = self._span is not None and rows == list(range(low, high))
        self._ends = ends.clamp_(min=1)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        module: nn.Module,
        query_1HND: Tensor,
        key_1KND: Tensor,
        value_1KND: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """[1, N, H, D]"""
        layer = self._layers[int(module.layer_idx)]  # pyright: ignore[reportArgumentType]
        layer.keys_RTKD.flatten(0, 1).index_copy_(0, self._targets_N, key_1KND[0].transpose(0, 1))
        layer.values_RTKD.flatten(0, 1).index_copy_(0, self._targets_N, value_1KND[0].transpose(0, 1))
        query_HND = query_1HND[0]
        outs: list[Tensor] = []
        if self._single_count:
            outs.append(self._attend_singles(layer, query_HND[:, : self._single_count], scaling, window))
        for long in self._long:
            outs.append(self._attend_long(layer, long, query_HND[:, long.first : long.last], scaling, window))
        return torch.cat(outs, dim=0)[None] if len(outs) > 1 else outs[0][None]

    def _attend_long(
        self, layer: Layer, long: _Long, query_HND: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        count = long.last - long.first
        end = long.cached + count
        mask = long.mask
        if window is not None and window < end:
            mask = _causal(long.cached, count, window, self._device)
        out_1HND = F.scaled_dot_product_attention(
            query_HND[None],
            layer.keys_RTKD[long.row : long.row + 1, :end].transpose(1, 2),
            layer.values_RTKD[long.row : long.row + 1, :end].transpose(1, 2),
            attn_mask=None if mask is None else mask.to(query_HND.dtype),
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return out_1HND[0].transpose(0, 1)

    def _attend_singles(self, layer: Layer, query_HBD: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Heads that share a key become queries of one head: no key is repeated."""
        heads, count, width = query_HBD.shape
        key_heads = layer.keys_RTKD.shape[2]
        query = query_HBD.transpose(0, 1).reshape(count, key_heads, heads // key_heads, width)
        if self._span is None:
            keys = layer.keys_RTKD[:, : self._length].index_select(0, self._rows_B)
            values = layer.values_RTKD[:, : self._length].index_select(0, self._rows_B)
        else:
            low, high = self._span
            keys = layer.keys_RTKD[low:high, : self._length]
            values = layer.values_RTKD[low:high, : self._length]
            if not self._dense:
                query = query.new_zeros(high - low, *query.shape[1:]).index_copy_(0, self._places_B, query)
        out = F.scaled_dot_product_attention(
            query,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._single_mask(window, query.dtype),
            scale=scaling,
        )
        if self._span is not None and not self._dense:
            out = out.index_select(0, self._places_B)
        return out.reshape(count, heads, -1)

    def _single_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            at = torch.arange(self._length, device=self._device)
            hidden = at >= self._ends[:, None]
            if window is not None:
                hidden |= at < self._ends[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


def _causal(cached: int, count: int, window: int | None, device: torch.device) -> Tensor:
    """[count, cached + count]: 0 where a token may look, minus infinity elsewhere."""
    at = torch.arange(cached + count, device=device)
    own = at[cached:, None]
    hidden = at > own
    if window is not None:
        hidden |= at <= own - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slots: Pass | Probe | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer."""
    for name in ("softcap", "s_aux"):
        if extras.get(name) is not None:
            raise TypeError(f"its attention needs {name!r}")
    if isinstance(slots, Pass):
        return slots.attend(module, query, key, value, scaling, sliding_window), None
    if isinstance(slots, Probe):
        return slots.attend(module, query, key, value, scaling), None
    raise TypeError("it does not hand keyword arguments on to its attention")


AttentionInterface.register(NAME, _attend)
