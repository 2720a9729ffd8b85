"""Attention over a KV cache of slots, for any transformers model that takes an attention function.

A forward pass is one packed row of N tokens: the segments of many sequences side by side, without padding. Everything
but attention works on tokens alone. Attention writes the new keys and values into the pool, token-major, and then lets
each segment look at its own row of the pool only.

Shapes: R rows, T tokens of context, N tokens of the pass, B segments of one token, H heads, K heads of keys, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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


SHORT = 256
"""Tokens of a segment, with those before it, up to which segments are looked at together."""

_SINGLE, _SHORT, _LONG = range(3)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Some tokens of a sequence, in a pass."""

    row: int
    cached: int
    """Tokens of the row that were there before."""

    first: int
    """Its place in the pass."""

    count: int


def order(start: int, count: int) -> tuple[int, int]:
    """Where a segment of `count` tokens after `start` others comes in a pass: alike ones lie side by side."""
    kind = _kind(start, count)
    return kind, count if kind == _SHORT else 0


def _kind(start: int, count: int) -> int:
    """How it is looked at."""
    if count == 1:
        return _SINGLE
    return _SHORT if start + count <= SHORT else _LONG


def cuts(counts: Sequence[int]) -> Iterator[slice]:
    """Growing counts in pieces, whose sums at most double where each count is padded to its piece's largest. Equal
    counts stay together."""
    first = tokens = 0
    for last, count in enumerate(counts):
        tokens += count
        if (last + 1 - first) * count > 2 * tokens:
            yield slice(first, last)
            first, tokens = last, count
    yield slice(first, len(counts))


class Pass:
    """Where the tokens of one forward pass belong."""

    def __init__(
        self,
        layers: Sequence[Layer],
        segments: Sequence[tuple[int, int, int]],
        *,
        device: torch.device,
    ) -> None:
        """`segments`: (row, tokens already there, new tokens), in their `order`."""
        self._layers = layers
        context = layers[0].keys_RTKD.shape[1]
        by_kind: tuple[list[_Segment], ...] = ([], [], [])
        first = 0
        for row, start, count in segments:
            by_kind[_kind(start, count)].append(_Segment(row, start, first, count))
            first += count
        rows, starts, counts = np.array(segments).T
        ends = np.cumsum(counts)
        positions = np.arange(first) + np.repeat(starts - (ends - counts), counts)
        self.position_ids_1N = torch.from_numpy(positions)[None].to(device)
        self._targets_N = torch.from_numpy(positions + np.repeat(rows * context, counts)).to(device)
        singles, shorts, longs = by_kind
        self._shares: list[_Singles | _Shorts | _Long] = [_Singles(singles, device)] if singles else []
        if shorts:
            self._shares += [_Shorts(shorts[cut], device) for cut in cuts([segment.count for segment in shorts])]
        self._shares += [_Long(segment, device) for segment in longs]

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
        outs = [share.attend(layer, query_HND[:, share.first : share.last], scaling, window) for share in self._shares]
        return torch.cat(outs, dim=0)[None] if len(outs) > 1 else outs[0][None]


class _Singles:
    """Segments of one token. They look at one stretch of rows where these lie close together, which copies nothing, and
    at gathered ones otherwise."""

    def __init__(self, segments: Sequence[_Segment], device: torch.device) -> None:
        self.first, self.last = segments[0].first, segments[-1].first + 1
        rows = [segment.row for segment in segments]
        low, high = min(rows), max(rows) + 1
        self._device = device
        self._span = (low, high) if high - low <= 2 * len(rows) else None
        self._rows_B = torch.tensor(rows, device=device)
        self._length = max(segment.cached for segment in segments) + 1
        ends = torch.zeros(high - low if self._span else len(rows), dtype=torch.long, device=device)
        places = self._rows_B - low if self._span else torch.arange(len(rows), device=device)
        ends[places] = torch.tensor([segment.cached + 1 for segment in segments], device=device)
        self._places_B = places
        self._dense = self._span is not None and rows == list(range(low, high))
        self._ends = ends.clamp_(min=1)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: Layer, query_HBD: Tensor, scaling: float | None, window: int | None) -> Tensor:
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
            attn_mask=self._mask(window, query.dtype),
            scale=scaling,
        )
        if self._span is not None and not self._dense:
            out = out.index_select(0, self._places_B)
        return out.reshape(count, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            at = torch.arange(self._length, device=self._device)
            self._masks[window] = _mask(at, self._ends[:, None] - 1, window, dtype)[:, None, None, :]
        return self._masks[window]


class _Shorts:
    """Segments of several tokens with few before them: padded to the longest, for a call for each costs more.
    No more than half of it is padding.

    Shapes: C tokens of the longest segment, E tokens of the longest row.
    """

    def __init__(self, segments: Sequence[_Segment], device: torch.device) -> None:
        self.first, self.last = segments[0].first, segments[-1].first + segments[-1].count
        self._device = device
        self._width = max(segment.count for segment in segments)
        self._length = max(segment.cached + segment.count for segment in segments)
        rows_B, cached_B, counts_B = np.array([(each.row, each.cached, each.count) for each in segments]).T
        begins_B = np.cumsum(counts_B) - counts_B
        self._rows_B = torch.from_numpy(rows_B).to(device)
        self._cached_B = torch.from_numpy(cached_B).to(device)
        tokens_BC = begins_B[:, None] + np.minimum(np.arange(self._width), counts_B[:, None] - 1)
        self._tokens = torch.from_numpy(tokens_BC.ravel()).to(device)
        """[B * C] the token at each place; where there is none, the segment's last one."""
        shifts_B = np.arange(len(segments)) * self._width - begins_B
        self._places_N = torch.from_numpy(np.arange(self.last - self.first) + np.repeat(shifts_B, counts_B)).to(device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: Layer, query_HND: Tensor, scaling: float | None, window: int | None) -> Tensor:
        heads, _, width = query_HND.shape
        query_BHCD = query_HND.index_select(1, self._tokens).view(heads, -1, self._width, width).transpose(0, 1)
        out_BHCD = F.scaled_dot_product_attention(
            query_BHCD,
            layer.keys_RTKD[:, : self._length].index_select(0, self._rows_B).transpose(1, 2),
            layer.values_RTKD[:, : self._length].index_select(0, self._rows_B).transpose(1, 2),
            attn_mask=self._mask(window, query_HND.dtype),
            scale=scaling,
            enable_gqa=True,
        )
        return out_BHCD.transpose(1, 2).flatten(0, 1).index_select(0, self._places_N)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            at_E = torch.arange(self._length, device=self._device)
            own_BC = self._cached_B[:, None] + torch.arange(self._width, device=self._device)
            self._masks[window] = _mask(at_E, own_BC[:, :, None], window, dtype)[:, None]
        return self._masks[window]


class _Long:
    """A segment of several tokens with many before them."""

    def __init__(self, segment: _Segment, device: torch.device) -> None:
        self.first, self.last = segment.first, segment.first + segment.count
        self._row, self._cached, self._end = segment.row, segment.cached, segment.cached + segment.count
        self._device = device
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: Layer, query_HND: Tensor, scaling: float | None, window: int | None) -> Tensor:
        is_plain = not self._cached and (window is None or window >= self._end)
        out_1HND = F.scaled_dot_product_attention(
            query_HND[None],
            layer.keys_RTKD[self._row : self._row + 1, : self._end].transpose(1, 2),
            layer.values_RTKD[self._row : self._row + 1, : self._end].transpose(1, 2),
            attn_mask=None if is_plain else self._mask(window, query_HND.dtype),
            is_causal=is_plain,
            scale=scaling,
            enable_gqa=True,
        )
        return out_1HND[0].transpose(0, 1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            at = torch.arange(self._end, device=self._device)
            self._masks[window] = _mask(at, at[self._cached :, None], window, dtype)
        return self._masks[window]


def _mask(at: Tensor, own: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a token at place `own` may look at place `at`, minus infinity elsewhere."""
    hidden = at > own
    if window is not None:
        hidden |= at <= own - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


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
    for name in ("softcap", "s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise TypeError(f"its attention needs {name!r}")
    if isinstance(slots, Pass):
        return slots.attend(module, query, key, value, scaling, sliding_window), None
    if isinstance(slots, Probe):
        return slots.attend(module, query, key, value, scaling), None
    raise TypeError("it does not hand keyword arguments on to its attention")


AttentionInterface.register(NAME, _attend)
