"""Where DeepSpeed's ZeRO keeps the master weights and Adam's moments of each parameter, and how to read and fill them.

Each rank has flat float32 tensors, which the optimiser steps, and of each parameter at most one piece of one of them;
moments lie in tensors of the same shape. Stages 1 and 2 cut all parameters together into one part for each rank; stage
3 cuts each alone, padded to equal parts.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank has of a parameter."""

    flat: Tensor
    """The tensor that it lies in."""

    at: int
    """Where in `flat` it begins."""

    start: int
    """Where in the flattened parameter it begins."""

    numel: int
    """Its elements."""


class States:
    """Master weights and moments of one engine's parameters. Moments are made at once, so that none is ever missing."""

    def __init__(self, optimizer: Any, stage: int) -> None:
        """`optimizer` is DeepSpeed's around torch's AdamW. Its attributes that are read here are no public interface,
        and have their names since version 0.9."""
        self._optimizer = optimizer
        self._sharded = stage == 3
        for flat in self._flats():
            optimizer.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
            }

    @property
    def step(self) -> Tensor:
        """Steps that the optimiser took: the same for every parameter."""
        return self._of(self._flats()[0])["step"]

    def set_step(self, step: Tensor) -> None:
        for flat in self._flats():
            self._of(flat)["step"].copy_(step.reshape(()))

    def reset(self) -> None:
        """Forget moments and steps."""
        for flat in self._flats():
            for tensor in self._of(flat).values():
                tensor.zero_()

    def read(self, param: nn.Parameter, moment: Moment | None) -> Tensor:
        """All of the parameter's master weights, or of a moment, on every rank. Collective."""
        whole = torch.zeros(numel_of(param), dtype=torch.float32, device=param.device)
        if (piece := self._piece(param)) is not None:
            whole[piece.start : piece.start + piece.numel] = self._view(piece, moment)
        dist.all_reduce(whole)
        return whole.view(shape_of(param))

    def fill(self, param: nn.Parameter, moment: Moment | None, whole: Tensor) -> None:
        """Take this rank's piece of it."""
        if (piece := self._piece(param)) is not None:
            self._view(piece, moment).copy_(whole.flatten()[piece.start : piece.start + piece.numel])

    def move(self, device: torch.device) -> None:
        """Move all of it there."""
        for flat in self._flats():
            flat.data = flat.data.to(device)
            state = self._of(flat)
            state.update({name: tensor.to(device) for name, tensor in state.items()})

    def _view(self, piece: Piece, moment: Moment | None) -> Tensor:
        tensor = piece.flat.detach() if moment is None else self._of(piece.flat)[moment]
        return tensor.narrow(0, piece.at, piece.numel)

    def _of(self, flat: Tensor) -> dict[str, Tensor]:
        return self._optimizer.optimizer.state[flat]

    def _flats(self) -> list[Tensor]:
        if self._sharded:
            return self._optimizer.fp32_partitioned_groups_flat
        return self._optimizer.single_partition_of_fp32_groups

    def _piece(self, param: Any) -> Piece | None:
        if self._sharded:
            group, at, padded = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
            start = dist.get_rank() * padded
            numel = min(padded, numel_of(param) - start)
            return Piece(self._flats()[group], at, start, numel) if numel > 0 else None
        if param._hp_mapping is None:
            return None
        within, here = param._hp_mapping.lp_fragment_address, param._hp_mapping.hp_fragment_address
        flat = self._flats()[param._hp_mapping.param_group_index]
        return Piece(flat, here.start, within.start, here.numel)


def numel_of(param: Any) -> int:
    """Of the whole parameter, which stage 3 leaves empty while nobody needs it."""
    return getattr(param, "ds_numel", param.numel())


def shape_of(param: Any) -> torch.Size:
    """Of the whole parameter."""
    return getattr(param, "ds_shape", param.shape)
