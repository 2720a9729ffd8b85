"""LoRA adapters as peft writes them: what each adds to a weight of the base model.

Engines serve base and adapter merged into plain weights: they need no feature of their own, and log-probabilities are
exactly those of the merged model. Whatever is not known to mean W + scale * B @ A is refused by its name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ValidationError
from torch import Tensor

from rollfarm.errors import WeightsMismatch

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

_OF_NO_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "ensure_weight_tying", "megatron_config", "megatron_core", "qalora_group_size"),
}
"""Settings that change nothing about what the tensors mean. The rank is that of the tensors."""


class _Settings(BaseModel, extra="allow"):
    """adapter_config.json. Of settings that are not named here, only those of no effect may be set."""

    peft_type: Literal["LORA"]
    lora_alpha: float
    use_rslora: bool = False
    bias: Literal["none"] = "none"

    init_lora_weights: Literal[True, False, "gaussian", "orthogonal"] = True
    """Others (PiSSA, LoftQ, ...) change the base model's weights too."""

    def scale(self, rank: int) -> float:
        """What B @ A counts."""
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one weight."""

    a: Tensor
    """[rank, in]"""

    b: Tensor
    """[out, rank]"""

    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        """The merged weight, f32[out, in]."""
        return weight.float() + self.scale * (self.b.float() @ self.a.float())


def read_deltas(config_json: bytes, tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Delta]:
    """What the adapter adds, by the name of the weight in `base`. Raises WeightsMismatch."""
    settings = _settings(config_json)
    weights = sorted({_weight_of(name) for name in tensors})
    return {weight: _delta(weight, settings, tensors, base) for weight in weights}


def _settings(config_json: bytes) -> _Settings:
    try:
        settings = _Settings.model_validate_json(config_json)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "adapter_config.json"
        raise WeightsMismatch(f"The adapter's {name} cannot be merged: {first['msg']}.", setting=name) from error
    for name, value in (settings.model_extra or {}).items():
        if value and name not in _OF_NO_EFFECT:
            raise WeightsMismatch(f"The adapter's {name} cannot be merged: it is {value!r}.", setting=name)
    return settings


def _weight_of(name: str) -> str:
    for suffix in (_A, _B):
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name.removeprefix(_PREFIX).removesuffix(suffix) + ".weight"
    raise WeightsMismatch(f"The adapter's {name} cannot be merged: it is no A or B of a weight.", tensor=name)


def _delta(weight: str, settings: _Settings, tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Delta:
    module = _PREFIX + weight.removesuffix(".weight")
    a, b = tensors.get(module + _A), tensors.get(module + _B)
    if a is None or b is None:
        raise WeightsMismatch(f"The adapter has only one of {module}'s lora_A and lora_B.", tensor=weight)
    own = base.get(weight)
    if own is None:
        raise WeightsMismatch(f"The model has no tensor {weight}, which the adapter adds to.", tensor=weight)
    fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and (b.shape[0], a.shape[1]) == tuple(own.shape)
    if not fits or not a.shape[0]:
        raise WeightsMismatch(
            f"The adapter's {list(b.shape)} by {list(a.shape)} does not fit {weight}, which is {list(own.shape)}.",
            tensor=weight,
        )
    return Delta(a, b, settings.scale(a.shape[0]))
