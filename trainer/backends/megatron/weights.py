"""This rank's share of the weights, by the names that Hugging Face gives them.

The order of names is the same on every rank, and whatever is collective follows it.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.backends.megatron.architecture import Architecture
from trainer.backends.megatron.groups import Groups, Seat
from trainer.backends.megatron.names import EMBEDDING, HEAD, Parameter, Part, parameters, whole
from trainer.backends.megatron.reading import Files


class Weights:
    """The parameters of this rank; `tensors` has them by Megatron's names, in any dtype, and is written in place."""

    def __init__(self, arch: Architecture, groups: Groups, tensors: Mapping[str, Tensor]) -> None:
        self._arch = arch
        self._groups = groups
        self._mine = {each.name: each for each in parameters(arch, groups.share(groups.seat))}
        assert self._mine.keys() == tensors.keys(), self._mine.keys() ^ tensors.keys()
        self._tensors = tensors
        self._meshes = {
            False: DeviceMesh.from_group(groups.all.tp, "cpu"),
            True: DeviceMesh.from_group(groups.all.expt_tp, "cpu"),
        }

    def read(self, path: str) -> None:
        """Fill them from a Hugging Face model. Raises ConfigError."""
        files = Files(path)
        for name, parameter in self._mine.items():
            rank, size = self._among(parameter, self._groups.seat)
            blocks = [files.block(part, rank, size) for part in parameter.parts]
            self._fill(parameter, blocks, self._tensors[name])

    def counts_once(self, name: str) -> bool:
        """Whether this rank's share of the parameter is one that no other rank of a copy of the model has, or is the
        first of those that are alike."""
        parameter = self._mine[name]
        is_copy = name == "output_layer.weight" and parameter.parts[0].name == EMBEDDING
        rank, _ = self._among(parameter, self._groups.seat)
        return not is_copy and (parameter.parts[0].axis is not None or rank == 0)

    def is_experts(self, name: str) -> bool:
        """Whether the parameter is one expert's."""
        return self._mine[name].expert is not None

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: rank 0 gets every whole tensor by name, a tied head after the embedding; others get nothing."""
        mine = {part.name: parameter for parameter in self._mine.values() for part in parameter.parts}
        owners = self._owners()
        for parameter in whole(self._arch):
            name = parameter.parts[0].name
            blocks: list[Tensor] = []
            if dist.get_rank() in owners[name]:
                held = mine[name]
                blocks = self._blocks(held, self._tensors[held.name])
            for index, part in enumerate(parameter.parts):
                found = self._gather(part, owners[name], blocks[index] if blocks else None)
                if found is not None:
                    yield part.name, found
                    if part.name == EMBEDDING and self._arch.tied:
                        yield HEAD, found

    def shards(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor of the shape of parameter `name`, in host memory: this rank's blocks, by Hugging Face's names, each
        as its share of the whole. A scalar comes under each of them."""
        parameter = self._mine[name]
        if tensor.ndim == 0:
            return {part.name: tensor.detach().to("cpu", copy=True) for part in parameter.parts}
        blocks = self._blocks(parameter, tensor)
        mesh = self._meshes[parameter.expert is not None]
        return {
            part.name: _shard(part, block.to("cpu").contiguous(), mesh)
            for part, block in zip(parameter.parts, blocks, strict=True)
        }

    def put_back(self, name: str, tensor: Tensor, shards: Mapping[str, Tensor]) -> None:
        """Fill a tensor of the shape of parameter `name` from what `shards` made of it."""
        parameter = self._mine[name]
        found = [shards[part.name] for part in parameter.parts]
        if tensor.ndim == 0:
            tensor.copy_(found[0])
        else:
            blocks = [each.to_local() if isinstance(each, DTensor) else each for each in found]
            self._fill(parameter, blocks, tensor)

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor of the model, and its shape."""
        for parameter in whole(self._arch):
            yield from ((part.name, part.shape) for part in parameter.parts)

    def _blocks(self, parameter: Parameter, tensor: Tensor) -> list[Tensor]:
        rank, size = self._among(parameter, self._groups.seat)
        return parameter.take_apart(tensor.detach(), self._arch, rank, size)

    def _fill(self, parameter: Parameter, blocks: list[Tensor], tensor: Tensor) -> None:
        _, size = self._among(parameter, self._groups.seat)
        with torch.no_grad():
            tensor.copy_(parameter.put_together(blocks, self._arch, len(tensor), size))

    def _among(self, parameter: Parameter, seat: Seat) -> tuple[int, int]:
        """The rank among those that share the parameter, and how many they are."""
        rank = seat.tensor if parameter.expert is None else seat.expert_tensor
        return rank, self._groups.layout.tensor

    def _owners(self) -> dict[str, list[int]]:
        """The ranks whose blocks, in this order, are a parameter; by the name of its first tensor."""
        owners: dict[str, list[int]] = {}
        takes: set[tuple[str, int]] = set()
        for rank, seat in enumerate(self._groups.seats):
            for parameter in parameters(self._arch, self._groups.share(seat)):
                copy = seat.data if parameter.expert is None else seat.expert_data
                place, _ = self._among(parameter, seat)
                part = parameter.parts[0]
                if copy or (part.name, place) in takes or (part.axis is None and place):
                    continue
                takes.add((part.name, place))
                owners.setdefault(part.name, []).append(rank)
        return owners

    def _gather(self, part: Part, owners: list[int], block: Tensor | None) -> Tensor | None:
        """The whole tensor, on rank 0."""
        if dist.get_rank() > 0:
            if block is not None:
                dist.send(block.contiguous(), 0)
            return None
        device = next(iter(self._tensors.values())).device
        blocks: list[Tensor] = []
        for index, owner in enumerate(owners):
            if owner == 0:
                assert block is not None
                blocks.append(block)
                continue
            where = part.block(index, len(owners))
            blocks.append(torch.empty([each.stop - each.start for each in where], dtype=torch.float32, device=device))
            dist.recv(blocks[-1], owner)
        return torch.cat(blocks, dim=part.axis) if part.axis is not None and len(blocks) > 1 else blocks[0]


def _shard(part: Part, block: Tensor, mesh: DeviceMesh) -> DTensor:
    placement = Replicate() if part.axis is None else Shard(part.axis)
    stride = torch.empty(part.shape, device="meta").stride()
    return DTensor.from_local(block, mesh, [placement], run_check=False, shape=torch.Size(part.shape), stride=stride)
