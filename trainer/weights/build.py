"""The transport that the configuration asks for."""

from pathlib import Path
from typing import Literal

import torch

from rollfarm.config import ConfigError
from trainer.config import TrainerConfig
from trainer.weights.groups import Links
from trainer.weights.shared import SharedMemory
from trainer.weights.store import Store
from trainer.weights.transport import Transport

FOLDER = "weights"
"""Within the run's folder, where the configuration names no other."""


def build_transport(config: TrainerConfig, run_folder: Path) -> Transport:
    """Raises ConfigError."""
    match config.transport:
        case "gloo" | "nccl":
            return _links(config, config.transport)
        case "store":
            return Store(config.store_folder or run_folder / FOLDER, deltas=config.store_deltas)
        case "ipc":
            return SharedMemory()


def _links(config: TrainerConfig, backend: Literal["gloo", "nccl"]) -> Links:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("trainer.transport: nccl needs a GPU, and torch finds none. Choose gloo, store or ipc.")
    try:
        return Links(
            host=config.weights_host,
            port=config.weights_port,
            timeout_seconds=config.transfer_timeout_seconds,
            backend=backend,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.weights_host and weights_port: cannot listen on {config.weights_host}:{config.weights_port}. "
            f"{str(error).splitlines()[0]}. Give an address of this machine, and another port or 0."
        ) from None
