"""Which ranks share what: Megatron-Core's process groups, and everybody's seat in them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from trainer.backends.meeting import meet_alone
from trainer.backends.megatron import cpu
from trainer.backends.megatron.layout import Layout
from trainer.backends.megatron.names import Share


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place."""

    tensor: int
    stage: int
    data: int
    """Which copy of the model, and which share of its positions; 0 for the first of both."""

    expert_tensor: int
    expert: int
    expert_data: int
    """Which copy of its experts."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this rank sits, and with whom."""

    layout: Layout
    all: ProcessGroupCollection
    seats: tuple[Seat, ...]
    """By rank."""

    rows_rank: int
    """Which of the layout.data ranks that have rows of their own."""

    @property
    def seat(self) -> Seat:
        """This rank's."""
        return self.seats[dist.get_rank()]

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank makes log-probabilities."""
        return self.seat.stage == self.layout.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's log-probabilities count: others have the same."""
        return self.is_last_stage and self.seat.tensor == 0 and self.all.cp.rank() == 0

    def share(self, seat: Seat) -> Share:
        """What of the model is there."""
        return Share(seat.stage, self.layout.pipeline, seat.expert, self.layout.expert)


def meet(layout: Layout, device: torch.device) -> Groups:
    """Collective. One layout for all models of a process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meet_alone(device)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            create_gloo_process_groups=False,
        )
        with cpu.running():
            # Nothing is drawn; but Megatron-Core wants a generator for it.
            model_parallel_cuda_manual_seed(0)
    return Groups(
        layout,
        ProcessGroupCollection.use_mpu_process_groups(),
        _seats(),
        parallel_state.get_data_parallel_rank(),
    )


def _seats() -> tuple[Seat, ...]:
    mine = torch.tensor(
        [
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        ]
    )
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return tuple(Seat(*each.tolist()) for each in everyone)
