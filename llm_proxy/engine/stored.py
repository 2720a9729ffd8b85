"""Versions that come from files: read, checked against the model, and copied into host memory.

A delta is the tensors that differ from a version before, each whole; whether that is the one in use is the receiver's
to know. Files are mapped, not read as a whole, so a version costs its own size once. An adapter becomes a whole version
too: the base model's weights with its own added. The base is read from model.path, so nothing of an earlier version
leaks in.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from llm_proxy.engine.lora import Delta, read_deltas
from rollfarm import stored
from rollfarm.errors import InvalidArgument, Unsupported, WeightsMismatch
from rollfarm.run import ModelConfig
from rollfarm.v1 import engine_pb2

_THREADS = 4
"""Tensors that are copied at a time."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version, or what it changes: tensors in mapped files, and what is added to some of them."""

    tensors: Mapping[str, Tensor]
    deltas: Mapping[str, Delta] = field(default_factory=dict[str, Delta])

    dtype: torch.dtype = torch.float32
    """The engine's: a sum is held at least as precisely."""

    def specs(self) -> list[engine_pb2.TensorSpec]:
        """The tensors as they will be staged."""
        return [
            engine_pb2.TensorSpec(
                name=name, dtype=str(self._dtype(name)).removeprefix("torch."), shape=list(tensor.shape)
            )
            for name, tensor in self.tensors.items()
        ]

    def _dtype(self, name: str) -> torch.dtype:
        own = self.tensors[name].dtype
        return torch.promote_types(own, self.dtype) if name in self.deltas else own

    def copy_to(self, views: Iterable[tuple[str, Tensor]]) -> None:
        """Fill memory with the values."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="copy-weights") as threads:
            for copied in [threads.submit(self._copy, name, view) for name, view in views]:
                copied.result()

    def _copy(self, name: str, view: Tensor) -> None:
        delta = self.deltas.get(name)
        view.copy_(self.tensors[name] if delta is None else delta.added_to(self.tensors[name]))


def open_version(
    weights: engine_pb2.StoredWeights, expected: Mapping[str, Tensor], model: ModelConfig | None
) -> StoredVersion:
    """The version, its files verified; whether its tensors fit the model is still to be checked.

    Raises InvalidArgument, Unsupported, WeightsFailed and WeightsMismatch.
    """
    files = stored.verified(weights)
    if weights.kind in (engine_pb2.StoredWeights.KIND_FULL, engine_pb2.StoredWeights.KIND_DELTA):
        return StoredVersion(_mapped(files.values()))
    if weights.kind == engine_pb2.StoredWeights.KIND_LORA:
        return _merged(files, expected, model)
    raise InvalidArgument(
        f"Stored weights of kind {weights.kind} are not known; KIND_FULL, KIND_LORA and KIND_DELTA are."
    )


def _merged(files: Mapping[str, Path], expected: Mapping[str, Tensor], model: ModelConfig | None) -> StoredVersion:
    if model is None:
        raise Unsupported("This engine has no base model for an adapter.")
    if files.keys() != {stored.ADAPTER_CONFIG, stored.ADAPTER_WEIGHTS}:
        raise InvalidArgument(
            f"An adapter is {stored.ADAPTER_CONFIG} and {stored.ADAPTER_WEIGHTS}, not {', '.join(files) or 'nothing'}."
        )
    base = {name: tensor for name, tensor in _mapped(_base_files(model)).items() if name in expected}
    deltas = read_deltas(files[stored.ADAPTER_CONFIG].read_bytes(), _mapped([files[stored.ADAPTER_WEIGHTS]]), base)
    for name in deltas:
        if sum(own is expected[name] for own in expected.values()) > 1:
            raise WeightsMismatch(f"The adapter adds to {name}, which is tied to another tensor.", tensor=name)
    return StoredVersion(base, deltas, getattr(torch, model.dtype))


def _base_files(model: ModelConfig) -> list[Path]:
    """Of the folder, or of the hub's copy on this machine."""
    config = cached_file(model.path, "config.json", local_files_only=True)
    files = sorted(Path(str(config)).parent.glob("model*.safetensors"))
    if not files:
        raise Unsupported(f"An adapter's base model is read from safetensors files, and {model.path} has none.")
    return files


def _mapped(files: Iterable[Path]) -> dict[str, Tensor]:
    """Every tensor by name. Raises WeightsMismatch."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise WeightsMismatch(f"{path} is no safetensors file: {error}.", path=path) from error
        if twice := found.keys() & tensors.keys():
            raise WeightsMismatch(f"{path} holds {min(twice)} a second time.", path=path)
        tensors |= found
    return tensors
