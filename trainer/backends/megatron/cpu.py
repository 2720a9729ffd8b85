"""Lets Megatron-Core run where there is no CUDA.

Megatron-Core names CUDA outright in places where any device would do: it asks for the current one, makes a counter on
"cuda", keeps CUDA's random states, waits for streams. Without CUDA the answer is the CPU and there is nothing to wait
for, so that a machine without one trains the very code that a machine with GPUs trains.
"""

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    """Whatever asks for CUDA gets the CPU. Of one thread."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func is Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class _Nothing:
    """A stream or an event of a device on which everything is done as soon as it is asked for."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def prepare() -> None:
    """Once in a process, before a model is built. Changes nothing where there is CUDA."""
    if torch.cuda.is_available():
        return
    replaced: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens are there already, and only have to become numbers."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def running() -> AbstractContextManager[object]:
    """To be entered around whatever Megatron-Core does."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CpuForCuda()
