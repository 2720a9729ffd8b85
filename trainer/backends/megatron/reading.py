"""Reads blocks of tensors out of a Hugging Face model's safetensors files: no rank reads more than its share."""

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from rollfarm.config import ConfigError
from trainer.backends.megatron.names import Part


class Files:
    """The weights of a folder, or of a name of the hub. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        self._path = path
        folder = Path(path) if Path(path).is_dir() else _download(path)
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._file_of.update(dict.fromkeys(tensors.keys(), file))
        if not self._file_of:
            raise ConfigError(
                f"model.path: {path!r} has no *.safetensors, which is all that the megatron backend reads. Save the "
                "model again with save_pretrained, or choose another trainer.backend."
            )

    def block(self, part: Part, rank: int, size: int) -> Tensor:
        """f32, the block of tensor-parallel rank `rank` of `size`. Raises ConfigError."""
        if part.name not in self._file_of:
            raise ConfigError(f"model.path: {self._path!r} has no tensor {part.name}. Its files are not complete.")
        with safe_open(self._file_of[part.name], framework="pt") as tensors:
            whole = tensors.get_slice(part.name)
            if tuple(whole.get_shape()) != part.shape:
                raise ConfigError(
                    f"model.path: {self._path!r} has {part.name} in shape {whole.get_shape()}, and its config says "
                    f"{list(part.shape)}. Correct config.json."
                )
            return whole[part.block(rank, size)].to(torch.float32)


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"model.path: {name!r} cannot be loaded: {error}") from None
