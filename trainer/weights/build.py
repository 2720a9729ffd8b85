"""The transport that the configuration asks for."""

from pathlib import Path

import torch

from rollfarm.config import ConfigError
from trainer.config import TrainerConfig
from trainer.ranks import choose_device
from trainer.weights.groups import Links
from trainer.weights.shared import SharedMemory
from trainer.weights.store import Store
from trainer.weights.transport import Transport

FOLDER = "weights"
"""Within the run's folder, where the configuration names no other."""


def build_transport(config: TrainerConfig, run_folder: Path) -> Transport:
    """Raises ConfigError."""
    match config.transport:
        case "gloo":
            return _links(config, gpu=None)
        case "nccl":
            return _links(config, gpu=_gpu(config))
        case "store":
            # Engines that slept without weights have nothing that a delta could change.
            deltas = config.store_deltas and not config.colocated
            return Store(config.store_folder or run_folder / FOLDER, deltas=deltas)
        case "ipc":
            return SharedMemory()


def _gpu(config: TrainerConfig) -> torch.device:
    device = choose_device(config.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.transport: nccl needs a GPU, and the trainer's device is {device.type}. Choose gloo, store or "
            "ipc, or another trainer.device."
        )
    return device


def _links(config: TrainerConfig, gpu: torch.device | None) -> Links:
    try:
        return Links(
            host=config.weights_host,
            port=config.weights_port,
            timeout_seconds=config.transfer_timeout_seconds,
            gpu=gpu,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.weights_host and weights_port: cannot listen on {config.weights_host}:{config.weights_port}. "
            f"{str(error).splitlines()[0]}. Give an address of this machine, and another port or 0."
        ) from None
