"""What adapters in a checkpoint mean something beside: their base model, and how strongly they act on it.

A checkpoint of adapters has their own tensors alone. Beside other weights, or with another alpha, they would be loaded
without complaint and be another policy.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel
from xxhash import xxh3_128

from rollfarm import checksums
from rollfarm.config import ConfigError
from trainer.backends import Settings
from trainer.backends.lora import BASE, adapted
from trainer.backends.passes import rank, world_size

_PASSING = {"architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys of a config.json that change nothing of what a model computes here."""

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """Of one policy's adapters."""

    base_weights: str
    """XXH3 128 of the names, shapes and float32 values of the base model's parameters, in hexadecimal."""

    base_config: str
    """XXH3 128 of its config.json, but for what changes nothing of what it computes."""

    rank: int
    alpha: float
    targets: list[str]
    """Last parts of the names of the layers that have adapters."""


def record_of(model: PreTrainedModel, source: PreTrainedModel | None, settings: Settings) -> AdapterRecord | None:
    """Of the adapters in `model`; None where it has none. Collective: `source`, on rank 0, has the base model's weights
    in host memory."""
    targets = sorted({name.rpartition(".")[2] for name, _ in adapted(model)})
    if not targets or settings.lora is None:
        return None
    weights = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)
    if rank() == 0:
        assert source is not None
        weights = torch.frombuffer(bytearray(_digest_of_weights(source)), dtype=torch.uint8)
    if world_size() > 1:
        dist.broadcast(weights, src=0)
    config = _digest_of_config(settings.path)
    return AdapterRecord(weights.numpy().tobytes().hex(), config, settings.lora.rank, settings.lora.alpha, targets)


def check_record(folder: Path, saved: object, ours: AdapterRecord, *, model: str) -> None:
    """Raises ConfigError unless what the checkpoint in `folder` says are these adapters, on this base model."""
    if not isinstance(saved, dict):
        raise ConfigError(
            f"{folder}: the checkpoint does not say which base model its adapters belong to. Go on with the version "
            "that wrote it, or choose another run.name."
        )
    wanted = asdict(ours)
    differing = [name for name in wanted if saved.get(name) != wanted[name]]
    if not differing:
        return
    if base := {"base_weights": "weights", "base_config": "config.json"}.get(differing[0]):
        raise ConfigError(
            f"{folder}: the adapters learnt on another base model: {model!r} has other {base}. Restore model.path and "
            "what it holds, or choose another run.name."
        )
    raise ConfigError(
        f"{folder}: the adapters were saved with trainer.lora.{differing[0]} = {saved.get(differing[0])}, and it is "
        f"{wanted[differing[0]]} now. Restore it, or choose another run.name."
    )


def _digest_of_weights(model: PreTrainedModel) -> bytes:
    digest = xxh3_128()
    params = {name.replace(BASE, ""): param for name, param in model.named_parameters() if ".lora_" not in name}
    for name in sorted(params):
        values = params[name].detach().float().contiguous()
        digest.update(json.dumps([name, list(values.shape)]).encode())
        digest.update(checksums.of_tensor(values.numpy()))
    return digest.digest()


def _digest_of_config(path: str) -> str:
    config = PreTrainedConfig.get_config_dict(path)[0]
    return xxh3_128(json.dumps(_lasting(config), sort_keys=True).encode()).hexdigest()


def _lasting(config: object) -> object:
    if not isinstance(config, dict):
        return config
    return {key: _lasting(config[key]) for key in config if key not in _PASSING and not str(key).startswith("_")}
