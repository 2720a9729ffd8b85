"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): ranks share the moments and master weights (stage 1), the gradients too
(stage 2), and the parameters too (stage 3).

Master weights, moments and sums of gradients are float32. In bfloat16 the model itself is bfloat16, a copy of the
master weights, and that copy is what is published and exported. Rank 0 reads the model; the other ranks are sent it.

Checkpoints are not DeepSpeed's own, which are pickles and bound to the number of ranks: master weights and moments go
through DistributedCheckpoint by the names that the other backends give them, so that any of them reads it.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as distributed_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from rollfarm.checkpoint_names import CheckpointNames
from rollfarm.config import ConfigError
from trainer.backend_config import DeepSpeedConfig
from trainer.backends import Scorer, Settings, Write
from trainer.backends.alone import on_rank_0
from trainer.backends.distributed_checkpoint import OPTIMIZER_PREFIX, DistributedCheckpoint
from trainer.backends.exporting import export_model
from trainer.backends.frozen import FrozenScorer
from trainer.backends.layers import keep_only_input, layers_of
from trainer.backends.meeting import meet_alone
from trainer.backends.passes import backward_pass, rank, score_pass, step_metrics, world_size
from trainer.backends.scoring import TokenModel, empty_model, load_model
from trainer.backends.zero_states import MOMENTS, Moment, States, numel_of, shape_of
from trainer.objective import LossFn
from trainer.rows import Row

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # It warns where it has to guess.
try:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
except ImportError:
    raise ConfigError(
        "trainer.backend: 'deepspeed' needs the package deepspeed. Install it: pip install 'rollfarm[deepspeed]'."
    ) from None

# DeepSpeed calls collectives by the names that torch had for them before 2.13.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

BUCKET_ELEMENTS = 64 * 1024 * 1024
"""Gradients are summed, and whole parameters gathered to be read, at most about so many elements at a time."""

Make = Callable[[PreTrainedModel], TokenModel]
"""A TokenModel around a causal language model, which may be on the meta device."""


class ZeroScorer:
    """A Scorer that never learns, its parameters in shards over all ranks: stage 3 alone has that."""

    def __init__(self, make: Make, settings: Settings, config: DeepSpeedConfig) -> None:
        _meet(settings)
        self._settings = settings
        self._config = config
        self._module = _from_rank_0(make, settings, settings.compute_dtype if config.stage == 3 else torch.float32)
        # Without dropout: the ratio to the behaviour policy has to be 1 when the weights are the same.
        self._module.eval()
        if config.activation_checkpointing:
            for layer in layers_of(self._module):
                keep_only_input(layer)
        if config.stage == 3:
            _cut(self._module, settings, config)
        self._engine = self._initialize()
        if config.stage == 3:
            _keep_head_whole(self._module)

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        return score_pass(
            rows,
            self._engine,
            temperature=temperature,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
            padded=self._module.padded,
        )

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        self._move(self._settings.device)

    def _initialize(self) -> Any:
        self._module.requires_grad_(False)
        config = _engine_config(self._settings, self._config)
        return deepspeed.initialize(model=self._module, config=config, dist_init_required=False)[0]

    def _move(self, device: torch.device) -> None:
        if self._config.offload_parameters:
            return
        self._engine.optimizer.partition_all_parameters()
        for param in self._module.parameters():
            shard = getattr(param, "ds_tensor")  # noqa: B009
            shard.data = shard.data.to(device)
        if self._settings.device.type != "cpu":
            torch.accelerator.empty_cache()


class ZeroBackend(ZeroScorer):
    """A Backend: a policy, or a critic."""

    def __init__(self, make: Make, settings: Settings, config: DeepSpeedConfig) -> None:
        super().__init__(make, settings, config)
        self._named = {name: param for name, param in self._module.named_parameters() if param.requires_grad}
        self._states = States(self._engine.optimizer, config.stage)
        self._checkpoint = DistributedCheckpoint()
        self._mesh = init_device_mesh("cpu", (world_size(),))

    def train_step(
        self, rows: Sequence[Row], loss_fn: LossFn, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        totals = backward_pass(
            rows,
            self._engine,
            loss_fn,
            temperature=temperature,
            norm=norm,
            token_budget=self._settings.micro_batch_tokens,
            device=self._settings.device,
            padded=self._module.padded,
            backward=self._backward,
        )
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm())
        return step_metrics(totals, rows, grad_norm=grad_norm, lr=lr, sound=self._engine.was_step_applied())

    def reset_optimizer(self) -> None:
        self._states.reset()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._checkpoint_names.stream(self._tensors())

    @cached_property
    def _checkpoint_names(self) -> CheckpointNames:
        return CheckpointNames(self._module.model)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By the names that they have in the model."""
        model = self._module.model
        persistent = model.state_dict().keys()
        for bucket in _buckets(model.named_parameters(remove_duplicate=False)):
            with deepspeed.zero.GatheredParameters([param for _, param in bucket]):
                yield from ((name, param.detach()) for name, param in bucket)
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)

    def save(self, folder: Path) -> Write:
        tensors: dict[str, Tensor] = {}
        for name, param, moment in self._spread():
            tensors[_key(name, moment)] = self._shard(self._states.read(param, moment))
        for name in self._named:
            tensors[_step_key(name)] = self._states.step
        return self._checkpoint.save(folder, tensors)

    def load(self, folder: Path) -> None:
        tensors = {_key(name, moment): self._empty_shard(shape_of(param)) for name, param, moment in self._spread()}
        steps = {_step_key(name): torch.zeros(()) for name in self._named}
        self._checkpoint.load(folder, {**tensors, **steps}, model=self._settings.path)
        for name, param, moment in self._spread():
            whole = _whole(tensors[_key(name, moment)])
            self._states.fill(param, moment, whole)
            if moment is None:
                with torch.no_grad(), deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                    param.copy_(whole)
        self._states.set_step(next(iter(steps.values())))

    def export(self, folder: Path) -> None:
        export_model(self._module.model, self._tensors(), folder, tokenizer=self._settings.path)

    def _initialize(self) -> Any:
        return deepspeed.initialize(
            model=self._module,
            optimizer=_adamw(self._module, self._settings),
            config=_engine_config(self._settings, self._config),
            dist_init_required=False,
        )[0]

    def _move(self, device: torch.device) -> None:
        if self._config.offload_parameters:
            return  # What is in host memory already DeepSpeed refuses to move.
        sharded = self._config.stage == 3
        if device == self._settings.device:
            self._engine.reload_states()
        else:
            # Of stage 3 it moves no moments but those of an optimiser of its own.
            include = [State.lp_params, State.lp_grads, State.contiguous_grad_buffer] if sharded else None
            self._engine.offload_states(include=include, pin_memory=self._settings.device.type == "cuda")
        if sharded and not self._config.offload_optimizer:
            self._states.move(device)

    def _backward(self, loss: Tensor) -> None:
        # DeepSpeed divides by the number of ranks. A loss that is not finite spoils the gradient, whatever its own
        # gradient is: DeepSpeed then skips the step.
        factor = torch.where(loss.detach().isfinite(), world_size(), torch.nan)
        self._engine.backward(loss * factor)

    def _spread(self) -> Iterator[tuple[str, nn.Parameter, Moment | None]]:
        """What lies in pieces on all ranks: of each parameter its master weights, and its moments."""
        for name, param in self._named.items():
            yield name, param, None
            for moment in MOMENTS:
                yield name, param, moment

    def _shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of it, in host memory, as DistributedCheckpoint takes them."""
        shard = self._empty_shard(whole.shape)
        if not isinstance(shard, DTensor):
            return whole.cpu()
        rows = -(-len(whole) // world_size())
        shard.to_local().copy_(whole[rank() * rows : (rank() + 1) * rows])
        return shard

    def _empty_shard(self, shape: torch.Size) -> Tensor:
        """Of a tensor with fewer rows than there are ranks, each has all."""
        if len(shape) == 0 or shape[0] < world_size() or world_size() == 1:
            return torch.zeros(shape)
        return distributed_tensor.zeros(shape, device_mesh=self._mesh, placements=[Shard(0)])


def frozen(make: Make, settings: Settings, config: DeepSpeedConfig) -> Scorer:
    """A model that never learns: in shards in stage 3, and else on every rank, as the policy is."""
    if config.stage == 3:
        return ZeroScorer(make, settings, config)
    module = make(load_model(settings.path, packing=settings.packing))
    for param in module.parameters():
        param.data = param.data.to(settings.compute_dtype)
    return FrozenScorer(module, replace(settings, compute_dtype=torch.float32))


def _meet(settings: Settings) -> None:
    """Let DeepSpeed work on this device, with the ranks as they have met. Raises ConfigError."""
    if settings.optimizer != "adamw":
        raise ConfigError(
            f"trainer.optimizer: the backend 'deepspeed' has no {settings.optimizer!r}. Choose 'adamw', or "
            "trainer.backend = 'fsdp2'."
        )
    accelerator: Any = get_accelerator()
    name, device = accelerator.device_name(), settings.device
    if name != device.type:
        raise ConfigError(
            f"trainer.device: DeepSpeed works on {name!r} here, not on {device.type!r}. Choose the one, or set "
            f"DS_ACCELERATOR={device.type} in the environment."
        )
    # It computes on the device of this number.
    os.environ["LOCAL_RANK"] = str(device.index if device.index is not None else os.environ.get("LOCAL_RANK", "0"))
    meet_alone(device)
    # What it would compile for ranks of one host to meet in shared memory, and ZeRO never uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


def _from_rank_0(make: Make, settings: Settings, dtype: torch.dtype) -> TokenModel:
    """The model on rank 0, its parameters in `dtype`; on the others one without a number in it but its buffers, for
    DeepSpeed sends them only the parameters. In host memory, which the others do not touch yet."""
    module = on_rank_0(lambda: _to_dtype(make(load_model(settings.path, packing=settings.packing)), dtype))
    if module is None:
        with torch.device("meta"):
            module = _to_dtype(make(empty_model(settings.path, packing=settings.packing)), dtype)
        module.to_empty(device="cpu")
    if world_size() > 1:
        # A folder may have a head of its own, whatever its configuration says; to_empty has untied it in any case.
        head, embeddings = module.model.get_output_embeddings(), module.model.get_input_embeddings()
        tied = torch.tensor(int(head is not None and head.weight is embeddings.weight))
        dist.broadcast(tied, src=0)
        if rank() > 0 and tied:
            module.model.tie_weights()
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
    return module


def _to_dtype(module: TokenModel, dtype: torch.dtype) -> TokenModel:
    for param in module.parameters():
        param.data = param.data.to(dtype)
    return module


def _cut(module: TokenModel, settings: Settings, config: DeepSpeedConfig) -> None:
    """Send each rank its shard of one parameter after the other, so that no device ever holds more of the model than
    its shards and one parameter: left to itself, DeepSpeed first moves all of the model there."""
    deepspeed.zero.Init(
        module=module, dtype=settings.compute_dtype, config_dict_or_path=_engine_config(settings, config)
    )
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, buffer.to(settings.device))


def _adamw(module: nn.Module, settings: Settings) -> torch.optim.AdamW:
    params = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if len(shape_of(param)) > 1], "weight_decay": settings.weight_decay},
        {"params": [param for param in params if len(shape_of(param)) <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=settings.betas, fused=True)


def _engine_config(settings: Settings, config: DeepSpeedConfig) -> dict[str, Any]:
    half = settings.compute_dtype is torch.bfloat16
    host = {"device": "cpu", "pin_memory": settings.device.type == "cuda"}
    zero: dict[str, Any] = {
        "stage": config.stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if config.stage == 3:
        zero["stage3_param_persistence_threshold"] = config.whole_up_to
    if config.offload_optimizer:
        zero["offload_optimizer"] = host
    if config.offload_parameters:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        # Micro-batches of a step are as many as rows need: the step says where they end.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": half},
        "communication_data_type": "fp32",
        # With stage 1 and float32 it would take an optimiser that keeps its states elsewhere.
        "data_types": {"grad_accum_dtype": "bf16" if half and config.stage == 1 else "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def _keep_head_whole(module: TokenModel) -> None:
    """Gather the head with what the model has itself, for a whole pass, and not for each of its calls.

    It is called as often as there are chunks of tokens, which ranks have different numbers of, and DeepSpeed insists on
    the same calls on every rank.
    """
    if (head := module.model.get_output_embeddings()) is None:
        return
    for param in head.parameters():
        deepspeed.zero.register_external_parameter(module, param)
    for hooks in (head._forward_pre_hooks, head._forward_hooks):  # pyright: ignore[reportPrivateUsage]
        hooks.clear()


def _buckets(params: Iterator[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters of at most BUCKET_ELEMENTS elements together; a larger one is alone."""
    bucket: list[tuple[str, nn.Parameter]] = []
    for name, param in params:
        if bucket and sum(numel_of(each) for _, each in bucket) + numel_of(param) > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append((name, param))
    if bucket:
        yield bucket


def _key(name: str, moment: Moment | None) -> str:
    """As the other backends name them."""
    return name if moment is None else f"{OPTIMIZER_PREFIX}{moment}.{name}"


def _step_key(name: str) -> str:
    return f"{OPTIMIZER_PREFIX}step.{name}"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
