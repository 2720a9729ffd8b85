"""Saving models that are wrapped in nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import modeling_utils


@contextmanager
def unwrapped() -> Iterator[None]:
    """transformers takes models as they are inside of it.

    Otherwise save_pretrained looks for a wrapper of DeepSpeed's and so imports that, wherever it is installed: a second
    of every run, whatever trains it.
    """
    unwrap = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = _as_it_is  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap


def _as_it_is(model: nn.Module) -> nn.Module:
    return model
