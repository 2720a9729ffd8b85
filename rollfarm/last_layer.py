"""Of the last layer only what predicts a token is read, so it works there alone, once its attention has looked around.

Which positions these are, its attention is told by an argument that a model hands on to it as it does the lengths of
rows. So it passes activation checkpointing, sharding and adapters. Every call says it anew; it is kept until the next
call of the attention, which comes before what needs it, in the same thread.

Legend: 1 the batch dimension, T positions of all rows, P those that are asked for, H what a module takes or makes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

ASKED = "asked_P"
"""The argument: i64[P], among T, each once."""


def spare(model: PreTrainedModel) -> None:
    """Let the last layer work where it is asked for alone, if it is attention and then a dense network."""
    decoder = getattr(model.base_model, "language_model", model.base_model)
    layers = getattr(decoder, "layers", None)
    if layers and _is_known(layers[-1]) and not hasattr(layers[-1], "asked"):
        layers[-1].asked = _Asked(layers[-1])


def _is_known(layer: nn.Module) -> bool:
    """Whether each position has a result of its own, once attention has looked at the others."""
    in_turn = hasattr(layer, "self_attn") and hasattr(layer, "post_attention_layernorm")
    others = [child for name, child in layer.named_children() if name not in ("self_attn", "mlp")]
    alone = all("Norm" in type(child).__name__ or isinstance(child, nn.Dropout) for child in others)
    is_dense = hasattr(getattr(layer, "mlp", None), "down_proj")
    return in_turn and alone and is_dense and hasattr(layer.self_attn, "o_proj")


class _Asked:
    """What the layer's attention was told last."""

    def __init__(self, layer: Any) -> None:
        self._at_P: Tensor | None = None
        layer.self_attn.register_forward_pre_hook(self._note, with_kwargs=True)
        for module in (layer.self_attn.o_proj, layer.mlp):
            # Instead of a wrapper, which would change names.
            module.forward = partial(self._there, module.forward)

    def _note(self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._at_P = kwargs.get(ASKED)

    def _there(self, forward: Callable[[Tensor], Tensor], given_1TH: Tensor) -> Tensor:
        """[1, T, H] what `forward` makes where it is asked for, and zeros elsewhere."""
        at_P = self._at_P
        if at_P is None:
            return forward(given_1TH)
        made_1PH = forward(given_1TH.index_select(1, at_P))
        return made_1PH.new_zeros(*given_1TH.shape[:2], made_1PH.shape[-1]).index_copy(1, at_P, made_1PH)
