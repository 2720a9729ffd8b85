"""Data-parallel ranks: rank 0 decides, the others follow by torch.distributed.

Rank 0 announces each collective call of the backend as two integers (command, bytes that follow) and then plain arrays;
nothing is pickled. A rank that dies breaks the others' collectives, so they all go down and are started again together;
a pulse while rank 0 is idle makes sure that this is noticed.

The rendezvous is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

import os
import signal
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.backends import Backend
from trainer.objective import LossFn
from trainer.rows import Row, decode, encode

PULSE_SECONDS = 10.0
"""While nothing else is announced, rank 0 says that it lives this often."""

_STEP_HEADER = struct.Struct("<ddd16s")


class Command(IntEnum):
    """What rank 0 announces."""

    STOP = 0
    PULSE = 1
    TRAIN = 2
    RESET = 3
    LOAD = 4


def rank() -> int:
    """This process's rank; 0 when it is alone."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks in all."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: torch.device, timeout_seconds: float) -> None:
    """Meet the other ranks, if there are any."""
    if world_size() > 1:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def choose_device(name: str) -> torch.device:
    """The configured device; "auto" is this rank's accelerator where there is one."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class Leader:
    """Rank 0's backend: the same verbs, with every collective one announced to the followers first."""

    def __init__(self, backend: Backend, objectives: Mapping[str, LossFn]) -> None:
        self._backend = backend
        self._objectives = objectives

    def train_step(
        self, rows: Sequence[Row], objective: str, *, temperature: float, norm: float, lr: float
    ) -> dict[str, float]:
        if world_size() > 1:
            _announce(Command.TRAIN, _STEP_HEADER.pack(temperature, norm, lr, objective.encode()) + encode(rows))
        return self._backend.train_step(rows, self._objectives[objective], temperature=temperature, norm=norm, lr=lr)

    def reset_optimizer(self) -> None:
        _announce(Command.RESET)
        self._backend.reset_optimizer()

    def load(self, folder: Path) -> None:
        _announce(Command.LOAD)
        self._backend.load(folder)

    def export_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._backend.export_named_tensors()

    def save(self, folder: Path) -> None:
        self._backend.save(folder)

    def export(self, folder: Path) -> None:
        self._backend.export(folder)

    def pulse(self) -> None:
        """Show the followers that rank 0 lives, and find out whether they do."""
        _announce(Command.PULSE)

    def stop(self) -> None:
        """Let the followers exit."""
        _announce(Command.STOP)


def follow(build: Callable[[], Backend], objectives: Mapping[str, LossFn]) -> None:
    """Do as rank 0 does until it says stop. Raises when rank 0 or another rank is gone."""
    backend = build()
    # Rank 0 finishes its step and saves before it lets the others go; a supervisor signals every rank at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        command, payload = _listen()
        if command is Command.STOP:
            return
        if command is Command.RESET:
            backend.reset_optimizer()
        elif command is Command.LOAD:
            backend.load(Path())
        elif command is Command.TRAIN:
            temperature, norm, lr, name = _STEP_HEADER.unpack_from(payload)
            rows = decode(payload[_STEP_HEADER.size :])
            objective = objectives[name.rstrip(b"\0").decode()]
            backend.train_step(rows, objective, temperature=temperature, norm=norm, lr=lr)


def _announce(command: Command, payload: bytes = b"") -> None:
    if world_size() == 1:
        return
    dist.broadcast(torch.tensor([command, len(payload)], dtype=torch.int64), src=0)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)


def _listen() -> tuple[Command, bytes]:
    header = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(header, src=0)
    command, size = Command(int(header[0])), int(header[1])
    payload = torch.zeros(size, dtype=torch.uint8)
    if size:
        dist.broadcast(payload, src=0)
    return command, payload.numpy().tobytes()
