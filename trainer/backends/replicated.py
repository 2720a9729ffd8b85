"""Plain torch: every rank holds the whole model and optimiser, gradients are summed over ranks.

Float32 master weights, fused AdamW, no randomness: the same rows give the same weights, whatever the number of ranks
and micro-batches, up to the order of float sums. Optimiser state is made at once, so that saving, loading and
broadcasting never meet a half-made one.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from rollfarm.config import ConfigError
from trainer.algorithms.losses import Metrics
from trainer.backends.logprobs import selected_logprobs
from trainer.objective import LossFn
from trainer.rows import MicroBatch, Row, blank, micro_batches, policy_token_count, share_of

OPTIMIZER_FILE = "optimizer.safetensors"
SHAPES_FILE = "shapes.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
REDUCE_NUMEL = 16 * 1024 * 1024
"""Gradients of at most this many elements are summed in one collective."""


class ReplicatedBackend:
    """A Backend for models that fit on one device. Ranks are those of torch.distributed, if it is initialised."""

    def __init__(
        self,
        path: str,
        *,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        micro_batch_tokens: int = 8192,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        logging.disable_progress_bar()
        self.device = device
        self.model = _load_model(path)
        nn.Module.to(self.model, device)
        # Without dropout: the ratio to the behaviour policy has to be 1 when the weights are the same.
        self.model.eval()
        self._path = path
        self._compute_dtype = compute_dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._max_grad_norm = max_grad_norm
        self._named = dict(self.model.named_parameters())
        self._params = list(self._named.values())
        self._optimizer = _adamw(self._params, weight_decay, betas)
        self.reset_optimizer()
        self._broadcast_state()

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        share = share_of(rows, _rank(), _world_size()) or [blank(rows[0])]
        totals: dict[str, float] = {}
        for batch in micro_batches(share, self._micro_batch_tokens, self.device):
            logp_P, entropy_P = self._forward(batch, temperature)
            loss_sum, metrics = loss_fn(logp_P, entropy_P, batch)
            loss = loss_sum / max(norm, 1e-12)
            loss.backward()
            _accumulate(totals, {"loss": loss.detach(), **metrics})
        self._sum_gradients()
        return self._apply(_over_ranks(totals), policy_token_count(rows), lr)

    def reset_optimizer(self) -> None:
        self._optimizer.state.clear()
        for param in self._params:
            self._optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }

    def export_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        save_file(
            {
                f"{moment}.{name}": self._optimizer.state[param][moment].cpu().contiguous()
                for name, param in self._named.items()
                for moment in MOMENTS
            },
            folder / OPTIMIZER_FILE,
        )
        (folder / SHAPES_FILE).write_text(json.dumps(self._shapes()))

    def load(self, folder: Path) -> None:
        if _rank() == 0:
            self._read(folder)
        self._broadcast_state()

    def export(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self._path).save_pretrained(folder)

    def _forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """f32[P] log-probabilities of the tokens in the mask, and entropies."""
        with torch.autocast(self.device.type, self._compute_dtype, enabled=self._compute_dtype is torch.bfloat16):
            return selected_logprobs(self.model, batch.ids_RT, batch.mask_RT, temperature=temperature)

    def _sum_gradients(self) -> None:
        if _world_size() == 1:
            return
        for params in _chunks(self._params, REDUCE_NUMEL):
            grads = [param.grad if param.grad is not None else torch.zeros_like(param) for param in params]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for param, summed in zip(params, flat.split([grad.numel() for grad in grads]), strict=True):
                param.grad = summed.view_as(param)

    def _apply(self, totals: dict[str, float], tokens: int, lr: float) -> dict[str, float]:
        """Step the optimiser, unless the step is poisoned. Every rank decides alike: it sees the same sums."""
        limit = self._max_grad_norm or torch.inf
        grad_norm = float(nn.utils.clip_grad_norm_(self._params, limit))
        sound = bool(np.isfinite(grad_norm) and np.isfinite(totals["loss"]))
        if sound:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        means = {
            name: value if name == "loss" or name.endswith("_max") else value / max(tokens, 1)
            for name, value in totals.items()
        }
        return {**means, "grad_norm": grad_norm, "lr": lr, "tokens": float(tokens), "skipped": float(not sound)}

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(param.shape) for name, param in self._named.items()}

    def _read(self, folder: Path) -> None:
        saved, ours = json.loads((folder / SHAPES_FILE).read_text()), self._shapes()
        if differing := sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)):
            raise ConfigError(
                f"{folder}: the checkpoint holds another model than {self._path}: {len(differing)} tensors differ, "
                f"such as {differing[0]}. Restore model.path, or choose another run.name."
            )
        self.model.load_state_dict(_load_model(str(folder)).state_dict())
        moments = load_file(folder / OPTIMIZER_FILE)
        for name, param in self._named.items():
            for moment in MOMENTS:
                self._optimizer.state[param][moment].copy_(moments[f"{moment}.{name}"])

    def _broadcast_state(self) -> None:
        """Make every rank's weights and moments those of rank 0."""
        if _world_size() == 1:
            return
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, src=0)
        for param in self._params:
            for moment in MOMENTS:
                dist.broadcast(self._optimizer.state[param][moment], src=0)


def _load_model(path: str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None


def _adamw(params: Iterable[nn.Parameter], weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    params = list(params)
    matrices = [param for param in params if param.ndim > 1]
    vectors = [param for param in params if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)


def _accumulate(totals: dict[str, float], metrics: Metrics) -> None:
    for name, value in metrics.items():
        found = float(value.detach())
        if name.endswith("_max"):
            totals[name] = max(totals.get(name, -float("inf")), found)
        else:
            totals[name] = totals.get(name, 0.0) + found


def _over_ranks(totals: dict[str, float]) -> dict[str, float]:
    """Sums and maxima over ranks; every rank has the same names."""
    if _world_size() == 1:
        return totals
    names = sorted(totals)
    sums = torch.tensor([totals[name] for name in names], dtype=torch.float64)
    maxima = sums.clone()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    reduced = zip(names, sums.tolist(), maxima.tolist(), strict=True)
    return {name: greatest if name.endswith("_max") else total for name, total, greatest in reduced}


def _chunks(params: Sequence[nn.Parameter], numel: int) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of at most `numel` elements together; a larger one is alone."""
    chunk: list[nn.Parameter] = []
    for param in params:
        if chunk and sum(each.numel() for each in chunk) + param.numel() > numel:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
