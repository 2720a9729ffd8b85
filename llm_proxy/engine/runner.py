"""The model part of the embedded engine: one forward pass over a plan's segments, and the weights it uses.

Not thread-safe: the engine's thread owns it. A pass reads and writes only the pool rows that its segments name.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from llm_proxy.engine.attention import NAME, Layer, Pass, Probe, order
from llm_proxy.engine.batching import Segment
from llm_proxy.engine.requests import Limits
from llm_proxy.engine.sampling import sample
from llm_proxy.engine.stepping import Sampled
from rollfarm.checkpoint_names import CheckpointNames
from rollfarm.config import ConfigError
from rollfarm.last_layer import ASKED, spare
from rollfarm.run import ModelConfig

log = structlog.get_logger()

ROWS_PER_SLOT = 4
"""Rows of the KV cache for each request that runs at once, memory permitting: sessions think longer than they speak."""


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that the setting means. Raises ConfigError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: torch finds no GPU. Set it to cpu or auto, or install torch with CUDA.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def load_model(config: ModelConfig, device: torch.device) -> Any:
    """The model, ready to generate with our attention. Raises ConfigError."""
    logging.disable_progress_bar()
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), attn_implementation=NAME
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {config.path} cannot be loaded: {error}") from error
    return model.to(device).eval().requires_grad_(False)


class Runner:
    """A model and its KV cache."""

    def __init__(self, model: Any, *, slots: int, context_tokens: int, kv_cache_bytes: int) -> None:
        """Raises ConfigError when the model or its cache does not fit."""
        self.model = model
        self._names = CheckpointNames(model)
        self._names.views(model.state_dict(keep_vars=True))  # That there are, is known now.
        self.device: torch.device = model.device
        self.context_tokens = _context(model.config, context_tokens)
        self._shapes = _probe(model)
        spare(model)
        row_bytes = self.context_tokens * sum(
            (keys[0] * keys[1] + values[0] * values[1]) * dtype.itemsize for keys, values, dtype in self._shapes
        )
        self.row_count = min(kv_cache_bytes // row_bytes, ROWS_PER_SLOT * slots)
        if self.row_count < 1:
            raise ConfigError(
                f"engine.kv_cache: {kv_cache_bytes} bytes do not hold one sequence of {self.context_tokens} tokens, "
                f"which needs {row_bytes}. Raise it, or lower engine.context_tokens."
            )
        self._layers = self._empty_cache()
        self._has_weights = True
        self.limits = Limits(min(slots, self.row_count), self.context_tokens, model.config.get_text_config().vocab_size)
        log.info("model loaded", device=str(self.device), kv_rows=self.row_count, kv_row_bytes=row_bytes)

    def _empty_cache(self) -> list[Layer]:
        """Zeros, because masked garbage still spreads when it is not finite."""
        shape = (self.row_count, self.context_tokens)
        return [
            Layer(
                torch.zeros(*shape, *keys, dtype=dtype, device=self.device),
                torch.zeros(*shape, *values, dtype=dtype, device=self.device),
            )
            for keys, values, dtype in self._shapes
        ]

    @property
    def is_ready(self) -> bool:
        """Whether it has a cache and weights."""
        return bool(self._layers) and self._has_weights

    def sleep(self, *, discard_weights: bool) -> None:
        """Free the cache, and the parameters where asked. They keep their identity and shape, around a single value."""
        self._layers = []
        if discard_weights:
            self._has_weights = False
            for parameter in self.model.parameters():
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)
        _give_back(self.device)

    def wake_up(self) -> None:
        """Have a cache again. The parameters' memory comes back with the next `load`."""
        if not self._layers:
            self._layers = self._empty_cache()

    @torch.inference_mode()
    def step(self, segments: Sequence[Segment], seeds: Sequence[int]) -> Sampled:
        """Compute the segments, and a token for each that samples. `seeds` belong to those, in order."""
        ordered = sorted(segments, key=lambda segment: order(segment.start, segment.count))
        slots = Pass(self._layers, [(s.sequence.slot, s.start, s.count) for s in ordered], device=self.device)
        tokens = np.concatenate([s.sequence.tokens[s.start : s.start + s.count] for s in ordered]).astype(np.int64)
        ends = np.cumsum([s.count for s in ordered]) - 1
        wanted = [s for s in segments if s.samples]
        place = {id(s): int(end) for s, end in zip(ordered, ends, strict=True)}
        last = torch.tensor([place[id(s)] for s in wanted], dtype=torch.long, device=self.device)
        out = self.model(
            input_ids=torch.from_numpy(tokens)[None].to(self.device),
            position_ids=slots.position_ids_1N,
            use_cache=False,
            logits_to_keep=last,
            slots=slots,
            **{ASKED: last},
        )
        if not wanted:
            return Sampled([], [], [])
        return sample(out.logits[0], [s.sequence.request for s in wanted], seeds, [s.sequence.length for s in wanted])

    def scrub(self) -> None:
        """Zero the cache: something in it is not finite."""
        for layer in self._layers:
            layer.keys_RTKD.zero_()
            layer.values_RTKD.zero_()

    def parameters(self) -> dict[str, Tensor]:
        """Every tensor that a sender may name, as the model's checkpoint has it; those that share memory appear under
        each of their names, and those that the model has in another form without values."""
        return self._names.shapes(self.model.state_dict(keep_vars=True))

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy values into the named parameters, converting their dtype. After a sleep without weights: into all."""
        if not self._has_weights:
            for parameter in self.model.parameters():
                parameter.data = torch.empty_like(parameter.data, memory_format=torch.contiguous_format)
            self._has_weights = True
        self._copy(tensors)

    @torch.inference_mode()
    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = self._names.views(self.model.state_dict(keep_vars=True))
        for name, tensor in tensors:
            own[name].copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _give_back(device: torch.device) -> None:
    """Return freed memory to the system; the C library keeps blocks of many megabytes for itself."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _context(config: Any, wanted: int) -> int:
    most: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None and not wanted:
        raise ConfigError("engine.context_tokens: the model names no limit of its own. Set one.")
    if most is not None and wanted > most:
        raise ConfigError(f"engine.context_tokens: {wanted} is more than the model's {most}. Lower it, or set 0.")
    return wanted or int(most or 0)


@torch.inference_mode()
def _probe(model: nn.Module) -> list[tuple[tuple[int, int], tuple[int, int], torch.dtype]]:
    """The shapes of each layer's keys and values, from one pass over one token."""
    probe = Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    layer_count = model.config.get_text_config().num_hidden_layers  # pyright: ignore
    try:
        model(input_ids=token, position_ids=token, use_cache=False, slots=probe)
    except TypeError as error:
        raise ConfigError(
            f"model.path: the embedded engine cannot serve a {type(model).__name__}: {error}. Use engine.adapter vllm."
        ) from error
    if sorted(probe.shapes) != list(range(layer_count)):
        raise ConfigError(
            f"model.path: the embedded engine cannot serve a {type(model).__name__}: {len(probe.shapes)} of its "
            f"{layer_count} layers are attention over keys and values. Use engine.adapter vllm."
        )
    return [probe.shapes[layer] for layer in range(layer_count)]
