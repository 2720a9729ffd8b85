"""Low-rank adapters (Hu et al. 2021) by peft: W + alpha / rank * B A, of which only A and B learn.

They are put into the model's own linear layers, so that every backend of torch's own holds them like any parameter.
Without them the model is the one that the run began with: a reference that takes no memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollfarm.config import ConfigError
from trainer.backend_config import LoraConfig
from trainer.backends.passes import rank
from trainer.rows import Row

if TYPE_CHECKING:
    import peft
    from peft.tuners.lora import LoraLayer

    from trainer.backends.module import ModuleBackend

NAME = "default"
"""Of the one adapter that there is."""

BASE = ".base_layer"
"""What peft puts into the names of the weights that it wraps."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> PreTrainedModel:
    """The model with adapters that change nothing yet; all else is frozen. Raises ConfigError."""
    adapter = _peft_config(config)
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(adapter, model, NAME)
        except ValueError as error:
            raise ConfigError(f"trainer.lora.targets: {error} Name linear layers of this model.") from None
    others = [name for name, layer in adapted(model) if not isinstance(layer.get_base_layer(), nn.Linear)]
    if others:
        raise ConfigError(f"trainer.lora.targets: {others[0]} is no linear layer. Name linear layers of this model.")
    return model


def merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by the name that it has without adapters, each adapter added to its weight. Whole."""
    layers = dict(adapted(model))
    for name, param in model.named_parameters(remove_duplicate=False):
        layer_name, of_layer, what = name.partition(BASE)
        if ".lora_" in name:
            continue
        tensor = whole(param.detach())
        if of_layer and what == ".weight":
            tensor = tensor + _delta(layers[layer_name])
        yield layer_name + what, tensor


def names_without(model: PreTrainedModel) -> list[str]:
    """Of every tensor, as they are without adapters."""
    return [name.replace(BASE, "") for name in model.state_dict() if ".lora_" not in name]


def write_adapter(model: PreTrainedModel, config: LoraConfig, folder: Path, *, base: str) -> None:
    """Write the adapters alone into an existing folder, as peft does: engines load them beside the model `base`.
    Collective; rank 0 writes."""
    adapters = {
        f"base_model.model.{name.replace(f'.{NAME}', '')}": whole(param.detach()).cpu().contiguous()
        for name, param in model.named_parameters()
        if ".lora_" in name
    }
    if rank() == 0:
        save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        adapter = _peft_config(config)
        adapter.target_modules = sorted({name.rpartition(".")[2] for name, _ in adapted(model)})
        adapter.base_model_name_or_path = base
        adapter.inference_mode = True
        adapter.save_pretrained(str(folder))


class WithoutAdapters:
    """A Scorer: the policy as it was before its adapters learnt. It has no weights of its own."""

    def __init__(self, policy: "ModuleBackend") -> None:
        self._policy = policy

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        with _adapters_off(self._policy.model):
            return self._policy.score(rows, temperature=temperature)

    def offload(self) -> None:
        """Nothing: the weights are the policy's, and move with it."""

    def reload(self) -> None:
        """Nothing, likewise."""


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may lie in shards, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _delta(layer: "LoraLayer") -> Tensor:
    a, b = (whole(part.get_submodule(NAME).get_parameter("weight").detach()) for part in (layer.lora_A, layer.lora_B))
    return layer.scaling[NAME] * (b @ a)


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    layers = [layer for _, layer in adapted(model)]
    # Not by enable_adapters(): it would change which parameters learn, and shards remember that from their first use.
    for layer in layers:
        layer._disable_adapters = True  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # pyright: ignore[reportPrivateUsage]


def adapted(model: nn.Module) -> "list[tuple[str, LoraLayer]]":
    """What peft put around linear layers. Without peft, which not everybody has, there are none."""
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]
    return cast("list[tuple[str, LoraLayer]]", found)


def _peft_config(config: LoraConfig) -> "peft.LoraConfig":
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "trainer.lora: adapters need peft, which is not installed. Run: pip install 'rollfarm[lora]'"
        ) from None
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(config.targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
