"""Optimisers by name, as every backend of torch's own uses them: parameters by name, plain or in shards.

State is made at once, so that saving and loading never meet a half-made one. It is the same whatever the sharding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollfarm.config import ConfigError
from trainer.backend_config import OptimizerName
from trainer.backends.distributed_checkpoint import OPTIMIZER_PREFIX

Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class Decay:
    """How fast things are forgotten."""

    weight_decay: float
    """Decoupled decay of matrices."""

    betas: tuple[float, float]
    """Decay of Adam's moments."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of torch's optimisers."""

    optimizer: torch.optim.Optimizer
    """It knows its parameters."""

    fresh: Callable[[nn.Parameter], dict[str, Tensor]]
    """The state of a parameter that was never stepped."""


class Optimizer:
    """Steps parameters by the optimiser of this name. `hidden` are those that are matrices of hidden layers."""

    def __init__(self, name: OptimizerName, params: Named, hidden: Set[str], decay: Decay) -> None:
        self._params = dict(params)
        self._parts = OPTIMIZERS[name](self._params, hidden, decay)
        self.reset()

    def step(self, lr: float) -> None:
        for part in self._parts:
            for group in part.optimizer.param_groups:
                _set_lr(group, lr)
            part.optimizer.step()

    def zero_grad(self) -> None:
        for param in self._params.values():
            param.grad = None

    def reset(self) -> None:
        """Forget what was learnt of the gradients."""
        for part in self._parts:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    part.optimizer.state[param] = part.fresh(param)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of its state, by name: to be saved, or filled and then taken."""
        return {
            _key(moment, name): _plain(tensor) for name, state in self._states() for moment, tensor in state.items()
        }

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned, and what was filled in since."""
        with torch.no_grad():
            for name, state in self._states():
                for moment, tensor in state.items():
                    if (filled := tensors[_key(moment, name)]) is not tensor:
                        _quantize(_local(tensor), _local(filled))

    def move(self, device: torch.device) -> None:
        """Move the state there."""
        for _, state in self._states():
            for moment, tensor in state.items():
                state[moment] = tensor.to(device)

    def _states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for name, param in self._params.items():
            for part in self._parts:
                if param in part.optimizer.state:
                    yield name, part.optimizer.state[param]


def _adamw(params: Named, hidden: Set[str], decay: Decay) -> list[Part]:
    """AdamW (Loshchilov and Hutter 2019), fused."""
    del hidden
    groups = _groups(params.values(), decay)
    return [Part(torch.optim.AdamW(groups, betas=decay.betas, fused=True), _adam_state)] if groups else []


def _muon(params: Named, hidden: Set[str], decay: Decay) -> list[Part]:
    """Muon (Jordan et al. 2024) for matrices of hidden layers, AdamW for all else. Its steps are scaled to the size of
    AdamW's (Liu et al. 2025, equation 4), so that one learning rate does for both."""
    matrices = [param for name, param in params.items() if name in hidden]
    rest = {name: param for name, param in params.items() if name not in hidden}
    if not matrices:
        return _adamw(rest, hidden, decay)
    muon = torch.optim.Muon(matrices, weight_decay=decay.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [Part(muon, _momentum_state), *_adamw(rest, hidden, decay)]


def _adamw_8bit(params: Named, hidden: Set[str], decay: Decay) -> list[Part]:
    """AdamW with moments in blocks of 256 numbers of 8 bits and a scale (Dettmers et al. 2022), by torchao. Tensors of
    fewer than 4096 numbers on a rank have them in float32. Checkpoints hold them in float32 too, as AdamW's do."""
    del hidden
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "trainer.optimizer: 'adamw_8bit' needs torchao, which is not installed. Run: pip install "
            "'rollfarm[torchao]', or choose 'adamw'."
        ) from None
    groups = _groups(params.values(), decay)
    optimizer = AdamW8bit(groups, betas=decay.betas)

    def fresh(param: nn.Parameter) -> dict[str, Tensor]:
        moments = {
            name: optimizer._new_buffer(param, signed) for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
        }
        return {"step": torch.zeros(()), **moments}

    return [Part(optimizer, fresh)]


OPTIMIZERS: dict[OptimizerName, Callable[[Named, Set[str], Decay], list[Part]]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}


def hidden_matrices(model: nn.Module, outside: Set[nn.Parameter]) -> set[str]:
    """Names of the weights of linear layers that learn, without those of `outside`: embeddings, and heads."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    skipped = {id(param) for param in outside}
    return {
        name
        for name, param in model.named_parameters()
        if id(param) in linear and id(param) not in skipped and param.ndim == 2
    }


def _groups(all_params: Iterable[nn.Parameter], decay: Decay) -> list[dict[str, Any]]:
    params = list(all_params)
    matrices = [param for param in params if param.ndim > 1]
    vectors = [param for param in params if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adam_state(param: nn.Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
    }


def _momentum_state(param: nn.Parameter) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _key(moment: str, name: str) -> str:
    return f"{OPTIMIZER_PREFIX}{moment}.{name}"


def _plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy in float32 of one that is kept in fewer bits."""
    local = _local(tensor)
    if not hasattr(local, "codes"):
        return tensor
    numbers = local.dequantize()
    if not isinstance(tensor, DTensor):
        return numbers
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(numbers, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _quantize(state: Any, numbers: Tensor) -> None:
    """Fill torchao's state so that numbers that came from one come back the same. Its own copy_ does not: it scales
    each block by its greatest magnitude, and the least value that a code stands for is not quite -1."""
    blocks, values = numbers.reshape(-1, state.block_size), state.qmap
    scale = blocks.amax(dim=1) / values[-1]
    if values[0] < 0:
        scale = torch.maximum(scale, blocks.amin(dim=1) / values[0])
    middles = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp_min(1e-30)[:, None], middles)
    state.codes.copy_(codes.view_as(state.codes))
    state.scale.copy_(scale)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
