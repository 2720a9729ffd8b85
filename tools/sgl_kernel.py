"""Stands in for SGLang's compiled kernels, of which the registry has none for CPU (tools/install-sglang.sh).

SGLang imports many of their names on any device, and with the backends that run on CPU calls this one alone.
"""

from collections.abc import Callable
from typing import Any

import torch

_OPERATORS = (
    *("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""What SGLang looks up, and does not call, where it imports models that take images."""

_library = torch.library.Library("sgl_kernel", "DEF")
for _operator in _OPERATORS:
    _library.define(f"{_operator}(Tensor x) -> Tensor")


def assign_req_to_token_pool_cpu(rows: Any, pool: Any, starts: Any, ends: Any, places: Any, row_length: int) -> None:
    """Note for each request, in its row, where its new tokens lie; `places` holds them one request after another."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[row, start:end] = places[done : done + end - start]
        done += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there is none for CPU")

    return absent
