"""The layers of a model: what backends shard, and compute again, in one piece."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.backends.scoring import TokenModel


def layers_of(model: TokenModel) -> list[nn.Module]:
    """Those that the architecture wants in one piece. Empty where it names none."""
    names = set(model.model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return [module for module in model.modules() if type(module).__name__ in names]


def keep_only_input(layer: nn.Module) -> None:
    """Let the layer keep only its input, and compute the rest again in the backward pass."""
    # Instead of a wrapper, which would change names.
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
