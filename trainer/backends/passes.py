"""What every backend does alike around its model: passes over rows, and sums over ranks."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithms.losses import Metrics
from trainer.micro_batches import MicroBatch, micro_batch, plan
from trainer.objective import LossFn
from trainer.rows import Row, policy_token_count

Forward = Callable[[MicroBatch, float], tuple[Tensor, Tensor]]
"""As TokenModel.forward."""


def backward_pass(
    rows: Sequence[Row],
    forward: Forward,
    loss_fn: LossFn,
    *,
    temperature: float,
    norm: float,
    token_budget: int,
    device: torch.device,
    padded: bool = False,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> dict[str, float]:
    """Gradients of this rank's share of the rows. The metrics of all ranks: sums, and maxima where so named.

    `padded` as TokenModel has it, here and below.
    """
    measured = Measured()
    for places in plan(rows, world_size(), token_budget, padded=padded)[rank()]:
        batch = micro_batch(rows, places, device)
        logp_P, entropy_P = forward(batch, temperature)
        loss_sum, metrics = loss_fn(logp_P, entropy_P, batch)
        loss = loss_sum / max(norm, 1e-12)
        backward(loss)
        measured.add({"loss": loss, **metrics})
    return over_ranks(measured.totals())


def score_pass(
    rows: Sequence[Row],
    forward: Forward,
    *,
    temperature: float,
    token_budget: int,
    device: torch.device,
    padded: bool = False,
) -> Tensor:
    """f32[P] on the CPU: what `forward` says of each token of the rows, in their order, on every rank."""
    ends = torch.tensor([row.policy_tokens for row in rows]).cumsum(0).tolist()
    scores_P = torch.zeros(policy_token_count(rows))
    with torch.no_grad():
        for places in plan(rows, world_size(), token_budget, padded=padded)[rank()]:
            found_P, _ = forward(micro_batch(rows, places, device), temperature)
            parts = found_P.float().cpu().split([rows[place].policy_tokens for place in places]) if places else ()
            for place, part in zip(places, parts, strict=True):
                scores_P[ends[place] - len(part) : ends[place]] = part
    if world_size() > 1:
        dist.all_reduce(scores_P)
    return scores_P


def is_sound(totals: dict[str, float], grad_norm: float) -> bool:
    """Whether the optimiser may step. Every rank decides alike: it sees the same sums."""
    return math.isfinite(grad_norm) and math.isfinite(totals["loss"])


def step_metrics(
    totals: dict[str, float], rows: Sequence[Row], *, grad_norm: float, lr: float, sound: bool
) -> dict[str, float]:
    """Sums over tokens to means, and what the step was."""
    tokens = policy_token_count(rows)
    means = {
        name: value if name == "loss" or name.endswith("_max") else value / max(tokens, 1)
        for name, value in totals.items()
    }
    return {**means, "grad_norm": grad_norm, "lr": lr, "tokens": float(tokens), "skipped": float(not sound)}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Measured:
    """The metrics of micro-batches. They stay on the device, which nobody waits for until the totals are read."""

    def __init__(self) -> None:
        self._found: list[tuple[tuple[str, ...], Tensor]] = []

    def add(self, metrics: Metrics) -> None:
        """Of one micro-batch, its "loss" among them."""
        device = metrics["loss"].device
        exact = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
        values = torch.stack([value.detach().to(device, exact) for value in metrics.values()])
        self._found.append((tuple(metrics), values))

    def totals(self) -> dict[str, float]:
        """Sums over micro-batches, and maxima where so named."""
        totals: dict[str, float] = {}
        values = torch.cat([values for _, values in self._found]).tolist() if self._found else []
        names = [name for names, _ in self._found for name in names]
        for name, value in zip(names, values, strict=True):
            if name.endswith("_max"):
                totals[name] = max(totals.get(name, -math.inf), value)
            else:
                totals[name] = totals.get(name, 0.0) + value
        return totals


def over_ranks(totals: dict[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sums and maxima over ranks, all of them or those of a group; each has the same names."""
    if world_size() == 1:
        return totals
    names = sorted(totals)
    sums = torch.tensor([totals[name] for name in names], dtype=torch.float64)
    maxima = sums.clone()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    reduced = zip(names, sums.tolist(), maxima.tolist(), strict=True)
    return {name: greatest if name.endswith("_max") else total for name, total, greatest in reduced}
