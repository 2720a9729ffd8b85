"""Plain torch: every rank holds the whole model and optimiser, gradients are summed over ranks.

Float32 master weights, fused AdamW, no randomness: the same rows give the same weights, whatever the number of ranks
and micro-batches, up to the order of float sums. Optimiser state is made at once, so that saving, loading and
broadcasting never meet a half-made one.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from rollfarm.config import ConfigError
from trainer.backends import Settings, Write
from trainer.backends.passes import backward_pass, is_sound, rank, score_pass, step_metrics, world_size
from trainer.backends.scoring import TokenModel
from trainer.micro_batches import MicroBatch
from trainer.objective import LossFn
from trainer.rows import Row

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
SHAPES_FILE = "shapes.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
REDUCE_NUMEL = 16 * 1024 * 1024
"""Gradients of at most this many elements are summed in one collective."""


class ReplicatedBackend:
    """A Backend for models that fit on one device. Ranks are those of torch.distributed, if it is initialised."""

    def __init__(self, model: TokenModel, settings: Settings) -> None:
        self._settings = settings
        self._model = model.to(settings.device)
        # Without dropout: the ratio to the behaviour policy has to be 1 when the weights are the same.
        self._model.eval()
        self._named = dict(self._model.named_parameters())
        self._params = list(self._named.values())
        self._optimizer = _adamw(self._params, settings.weight_decay, settings.betas)
        self.reset_optimizer()
        self._broadcast_state()

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        return score_pass(
            rows,
            self._forward,
            temperature=temperature,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
        )

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        totals = backward_pass(
            rows,
            self._forward,
            loss_fn,
            temperature=temperature,
            norm=norm,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
        )
        self._sum_gradients()
        grad_norm = float(nn.utils.clip_grad_norm_(self._params, self._settings.max_grad_norm or torch.inf))
        sound = is_sound(totals, grad_norm)
        if sound:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return step_metrics(totals, rows, grad_norm=grad_norm, lr=lr, sound=sound)

    def reset_optimizer(self) -> None:
        self._optimizer.state.clear()
        for param in self._params:
            self._optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.model.state_dict().items()

    def save(self, folder: Path) -> Write:
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self._model.state_dict().items()}
        moments = {
            f"{moment}.{name}": self._optimizer.state[param][moment].cpu().clone()
            for name, param in self._named.items()
            for moment in MOMENTS
        }

        def write() -> None:
            if rank() == 0:
                save_file(weights, folder / WEIGHTS_FILE)
                save_file(moments, folder / OPTIMIZER_FILE)
                (folder / SHAPES_FILE).write_text(json.dumps(self._shapes()))

        return write

    def load(self, folder: Path) -> None:
        if rank() == 0:
            self._read(folder)
        self._broadcast_state()

    def export(self, folder: Path) -> None:
        if rank() == 0:
            self._model.model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self._settings.path).save_pretrained(folder)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        self._move(self._settings.device)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        for param in self._params:
            state = self._optimizer.state[param]
            state.update({moment: state[moment].to(device) for moment in MOMENTS})

    def _forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = self._settings.compute_dtype
        with torch.autocast(self._settings.device.type, dtype, enabled=dtype is torch.bfloat16):
            return self._model(batch, temperature)

    def _sum_gradients(self) -> None:
        if world_size() == 1:
            return
        for params in _chunks(self._params, REDUCE_NUMEL):
            grads = [param.grad if param.grad is not None else torch.zeros_like(param) for param in params]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for param, summed in zip(params, flat.split([grad.numel() for grad in grads]), strict=True):
                param.grad = summed.view_as(param)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(param.shape) for name, param in self._named.items()}

    def _read(self, folder: Path) -> None:
        saved, ours = json.loads((folder / SHAPES_FILE).read_text()), self._shapes()
        if differing := sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)):
            raise ConfigError(
                f"{folder}: the checkpoint holds another model than {self._settings.path}: {len(differing)} tensors "
                f"differ, such as {differing[0]}. Restore model.path, or choose another run.name."
            )
        self._model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        moments = load_file(folder / OPTIMIZER_FILE)
        for name, param in self._named.items():
            for moment in MOMENTS:
                self._optimizer.state[param][moment].copy_(moments[f"{moment}.{name}"])

    def _broadcast_state(self) -> None:
        """Make every rank's weights and moments those of rank 0."""
        if world_size() == 1:
            return
        for tensor in self._model.state_dict().values():
            dist.broadcast(tensor, src=0)
        for param in self._params:
            for moment in MOMENTS:
                dist.broadcast(self._optimizer.state[param][moment], src=0)


def _adamw(params: Iterable[nn.Parameter], weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    params = list(params)
    matrices = [param for param in params if param.ndim > 1]
    vectors = [param for param in params if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)


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
