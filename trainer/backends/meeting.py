"""How ranks meet by torch.distributed, and part."""

import atexit
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

PARTING_SECONDS = 0.1
"""A process that has met others ends so much later. Gloo's threads let go of the last tensors after their collective
is over, and need the interpreter for it: one that is about to end has them abort the process (pytorch/pytorch#190489).
Destroying the groups would not do, for it waits for a group's threads only where nothing else refers to the group.
"""


def meet(device: torch.device, timeout_seconds: float) -> None:
    """Meet the ranks of torchrun's rendezvous, which wait for each other for so long from then on."""
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_seconds))
    atexit.register(time.sleep, PARTING_SECONDS)


def meet_alone(device: torch.device) -> None:
    """A group of one rank, for what asks for a group where no rank has met others."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
        atexit.register(time.sleep, PARTING_SECONDS)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
