"""Checkpoints of tensors that are spread over ranks, by torch.distributed.checkpoint.

A folder holds safetensors files, in each the shards that one rank wrote and where they lie in their tensors, and an
index that comes last: a folder without one holds nothing. However many ranks wrote it, any number reads it, and so does
another backend whose tensors have the same names.

Nothing here is a pickle. torch's usual format has one, `.metadata`; its safetensors format is used instead, in which a
reader finds everything in the headers of the files.
"""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rollfarm.config import ConfigError
from trainer.backends import WRITE_TIMEOUT, Write
from trainer.backends.passes import rank, world_size

INDEX_FILE = "index.json"
FILE_BYTES = 1 << 30
"""About how much goes into one file. A file is put together in host memory before it is written."""

Shapes = Mapping[str, list[int]]
"""Of tensors by name."""

# It says so for every single process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class DistributedCheckpoint:
    """Saves and loads one model's tensors. To be made, and each method called, on every rank in the same order."""

    def __init__(self) -> None:
        # A group of its own, so that writing in another thread never meets the collectives of training.
        group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if world_size() > 1 else None
        self._group = group if isinstance(group, dist.ProcessGroup) else None
        self._host_mesh: DeviceMesh | None = None

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        *,
        shapes: Shapes | None = None,
        notes: Mapping[str, object] | None = None,
    ) -> Write:
        """Copy the tensors to host memory. What is returned writes them, and has to be called once on every rank; it
        raises OSError on each where any of them could not write. `shapes` has every tensor's, where ranks hold
        different ones; `notes` is what `notes_of` reads, in terms of JSON."""
        with torch.no_grad():
            copies = {name: self._to_host(_at_least_1d(tensor)) for name, tensor in tensors.items()}
        every = shapes or {name: list(tensor.shape) for name, tensor in copies.items()}
        files = _files(every)

        def write() -> None:
            writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
            try:
                save(dict(copies), storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            except CheckpointException as failed:
                raise _cause(failed) from None
            if rank() == 0:
                (folder / INDEX_FILE).write_text(json.dumps({"tensors": every, **(notes or {})}))

        return write

    def load(self, folder: Path, tensors: Mapping[str, Tensor], *, model: str, shapes: Shapes | None = None) -> None:
        """Fill the tensors in place. `model` names what they belong to; `shapes` as in `save`. Raises ConfigError where
        the folder holds another model or optimiser, was never completed, or is damaged."""
        ours = {name: _at_least_1d(tensor.detach()) for name, tensor in tensors.items()}
        _check_same(folder, shapes or {name: list(tensor.shape) for name, tensor in ours.items()}, model)
        reader = HuggingFaceStorageReader(str(folder))
        try:
            load(dict(ours), storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as failed:
            if isinstance(cause := _cause(failed), OSError):
                raise cause from None
            raise ConfigError(
                f"{folder}: the checkpoint is damaged. Remove it, to go on from the one before, or restore it. {cause}"
            ) from None

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        mesh = tensor.device_mesh
        if mesh.device_type != "cpu":
            self._host_mesh = self._host_mesh or init_device_mesh("cpu", (world_size(),))
            mesh = self._host_mesh
        local = tensor.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def notes_of(folder: Path) -> dict[str, object]:
    """What was noted beside the tensors. Raises ConfigError where the folder holds no complete checkpoint."""
    return {name: note for name, note in _index(folder).items() if name != "tensors"}


def _index(folder: Path) -> dict[str, Any]:
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ConfigError(f"{folder}: not a complete checkpoint: it has no {INDEX_FILE}. Remove it, or restore it.")
    return json.loads(index.read_text())


def _check_same(folder: Path, ours: Shapes, model: str) -> None:
    saved: dict[str, list[int]] = _index(folder)["tensors"]
    differing = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if not differing:
        return
    of_model = [name for name in differing if not name.startswith(OPTIMIZER_PREFIX)]
    if not of_model:
        raise ConfigError(
            f"{folder}: the checkpoint was written by another optimiser: {len(differing)} of its tensors differ, such "
            f"as {differing[0]}. Restore trainer.optimizer, or choose another run.name."
        )
    raise ConfigError(
        f"{folder}: the checkpoint holds another model than {model}: {len(of_model)} tensors differ, such as "
        f"{of_model[0]}, {_shape(saved, of_model[0])} there and {_shape(ours, of_model[0])} here. Restore model.path "
        "and [trainer.lora], or choose another run.name."
    )


def _shape(shapes: Shapes, name: str) -> str:
    return str(shapes[name]) if name in shapes else "missing"


OPTIMIZER_PREFIX = "optimizer."
"""What the names of an optimiser's tensors begin with."""


def _files(shapes: Shapes) -> dict[str, int]:
    """The file of each tensor, from 1: the same on every rank, of whose share in each this is a guess."""
    files: dict[str, int] = {}
    written = 0
    for name, shape in shapes.items():
        files[name] = 1 + written // FILE_BYTES
        written += 4 * math.prod(shape) // world_size()
    return files


def _at_least_1d(tensor: Tensor) -> Tensor:
    """A view: the format has no slices of a scalar."""
    return tensor if tensor.ndim else tensor.view(1)


def _cause(failed: CheckpointException) -> Exception:
    """What went wrong, as whoever called expects it: torch's own is not even an Exception."""
    errors = [error for error, _ in failed.failures.values()]
    found = next((error for error in errors if isinstance(error, OSError)), errors[0])
    return found if isinstance(found, OSError) else RuntimeError(f"{type(found).__name__}: {found}")
