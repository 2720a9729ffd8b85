"""A model's tensors as its checkpoint on the hub has them: names and shapes that every engine knows.

transformers keeps some tensors otherwise than checkpoints do, such as all experts of a layer in one, and converts them
as it loads and saves. Weights on their way are in the checkpoint's format, whoever sends and takes them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from rollfarm.config import ConfigError


class CheckpointNames:
    """How one model's tensors lie in its checkpoint. The model may be on the meta device, and in shards."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str] | None = None) -> None:
        """`names` are those of its tensors, where adapters have changed what the model itself says."""
        # The architecture's own, whatever the files of this model wanted: every process then has the same names.
        of_architecture = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in of_architecture if not isinstance(each, PrefixChange)]
        # What is converted is converted by these, and transformers need not look for them at each call.
        model._weight_conversions = conversions  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        self._model = model
        self._renamed, self._groups = _affected(model.state_dict().keys() if names is None else names, conversions)
        self._sizes = Counter(self._groups.values())

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors, each as soon as what it is made of came. They are views where that can be; one of
        `tensors` has to stay as it is until the next is asked for."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            if (group := self._groups.get(name)) is None:
                yield self._renamed.get(name, name), tensor
                continue
            parts = waiting.setdefault(group, {})
            parts[name] = tensor if self._sizes[group] == 1 else tensor.clone()
            if len(parts) == self._sizes[group]:
                yield from self._converted(waiting.pop(group)).items()

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors, such that what is written into them is in `tensors`; one that is not converted is
        the same object. Raises ConfigError for a model that has a tensor together from several of its checkpoint's."""
        found = dict(self.stream(tensors.items()))
        memory = {_memory(tensor) for tensor in tensors.values()}
        if copies := [name for name, tensor in found.items() if _memory(tensor) not in memory]:
            raise ConfigError(
                f"model.path: {type(self._model).__name__} has {copies[0]} in another form than its checkpoint, which "
                "cannot be written in place. Use engine.adapter vllm."
            )
        return found

    def shapes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors: without values where they are converted, and else the same objects."""
        no_values = {name: tensor.detach().to("meta") for name, tensor in tensors.items() if name in self._groups}
        own = {id(tensor) for tensor in tensors.values()}
        return {
            name: tensor if id(tensor) in own else torch.nn.Parameter(tensor, requires_grad=False)
            for name, tensor in self.stream({**tensors, **no_values}.items())
        }

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with _Views():
            return revert_weight_conversion(self._model, tensors)


class _Views(TorchFunctionMode):
    """Lets no tensor be copied only to lie in one piece."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _affected(names: Iterable[str], conversions: list[WeightTransform]) -> tuple[dict[str, str], dict[str, str]]:
    """The tensors that only have another name, and that; and those that are converted, each with what it has in common
    with others that it is converted together with."""
    backwards = [conversion.reverse_transform() for conversion in conversions[::-1]]
    renamings = [each for each in backwards if isinstance(each, WeightRenaming)]
    converters = [each for each in backwards if isinstance(each, WeightConverter)]
    renamed: dict[str, str] = {}
    converted: dict[str, str] = {}
    for name in names:
        key, pattern = rename_source_key(name, renamings, converters, reverse=True)
        (renamed if pattern is None else converted)[name] = key
    return renamed, converted


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
