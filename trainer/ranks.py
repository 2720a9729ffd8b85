"""Data-parallel ranks: rank 0 decides, the others follow by torch.distributed.

Rank 0 announces each collective call as three integers (command, role, bytes that follow) and then plain arrays;
nothing is pickled. A rank that dies breaks the others' collectives, so they all go down and are started again together;
a pulse while rank 0 is idle makes sure that this is noticed.

The rendezvous is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

import errno
import os
import signal
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import structlog
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.backends import WRITE_TIMEOUT, AdapterBackend, Backend, Scorer, Write
from trainer.backends.meeting import meet
from trainer.checkpoints import sync_tree
from trainer.disk import os_errors
from trainer.objective import LossFn
from trainer.rows import Row, decode, encode

log = structlog.get_logger()

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
    SCORE = 5
    TENSORS = 6
    SAVE = 7
    EXPORT = 8
    OFFLOAD = 9
    RELOAD = 10
    ADAPTER = 11


class Role(IntEnum):
    """What a model is there for."""

    POLICY = 0
    CRITIC = 1
    REFERENCE = 2
    TEACHER = 3


@dataclass(frozen=True, slots=True)
class Models:
    """Every model of a rank, by what it is there for."""

    learners: Mapping[Role, Backend]
    """The policy, and a critic perhaps."""

    scorers: Mapping[Role, Scorer] = field(default_factory=dict[Role, Scorer])
    """Those that never learn."""

    def scorer(self, role: Role) -> Scorer:
        """The model, if only to ask it."""
        return self.learners[role] if role in self.learners else self.scorers[role]


def rank() -> int:
    """This process's rank; 0 when it is alone."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks in all."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: torch.device, timeout_seconds: float) -> None:
    """Meet the other ranks, if there are any that were not met before."""
    if world_size() > 1 and not dist.is_initialized():
        meet(device, timeout_seconds)


def choose_device(name: str) -> torch.device:
    """The configured device; "auto" is an accelerator where there is one, and "cuda" is this rank's own."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu" if name == "auto" else name)


class Leader:
    """Rank 0's models: the same verbs, each announced to the followers first."""

    def __init__(self, models: Models, objectives: Mapping[str, LossFn]) -> None:
        self._models = models
        self._objectives = objectives
        self._writers = Writers()

    @property
    def roles(self) -> set[Role]:
        """The models that there are."""
        return {*self._models.learners, *self._models.scorers}

    def train_step(
        self,
        rows: Sequence[Row],
        objective: str,
        *,
        temperature: float,
        norm: float,
        lr: float,
        role: Role = Role.POLICY,
    ) -> dict[str, float]:
        if world_size() > 1:
            payload = _STEP_HEADER.pack(temperature, norm, lr, objective.encode()) + encode(rows)
            _announce(Command.TRAIN, role, payload)
        return self._models.learners[role].train_step(
            rows, self._objectives[objective], temperature=temperature, norm=norm, lr=lr
        )

    def score(self, rows: Sequence[Row], *, temperature: float, role: Role = Role.POLICY) -> Tensor:
        if world_size() > 1:
            _announce(Command.SCORE, role, _STEP_HEADER.pack(temperature, 0, 0, b"") + encode(rows))
        return self._models.scorer(role).score(rows, temperature=temperature)

    def reset_optimizer(self, role: Role = Role.POLICY) -> None:
        _announce(Command.RESET, role)
        self._models.learners[role].reset_optimizer()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Of the policy. To be exhausted."""
        _announce(Command.TENSORS)
        return self._models.learners[Role.POLICY].named_tensors()

    def save(self, folder: Path) -> Write:
        """Copy every model that learns, to be written into an existing folder. Every rank writes its part, in a thread
        of its own; writing raises OSError here where any of them could not."""
        for place in _places(self._models, folder).values():
            place.mkdir(exist_ok=True)  # Before anybody is told: there may be no room for it.
        _announce(Command.SAVE, payload=str(folder).encode())
        return _save(self._models, folder, self._writers)

    def load(self, folder: Path) -> None:
        """Go on from what was written there."""
        _announce(Command.LOAD, payload=str(folder).encode())
        _load(self._models, folder)

    def export(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, and have it on disk. Raises OSError."""
        _announce(Command.EXPORT, payload=str(folder).encode())
        self._models.learners[Role.POLICY].export(folder)

    def export_adapter(self, folder: Path) -> None:
        """Write the policy's adapters alone, where [trainer.lora] asks for them, in peft's format."""
        _announce(Command.ADAPTER, payload=str(folder).encode())
        _export_adapter(self._models, folder)

    def offload(self, role: Role = Role.POLICY) -> None:
        _announce(Command.OFFLOAD, role)
        _offload(self._models, role)

    def reload(self, role: Role = Role.POLICY) -> None:
        _announce(Command.RELOAD, role)
        self._models.scorer(role).reload()

    def move(self, *, to_host: bool) -> None:
        """Move every model to host memory, or back to where it computes."""
        for role in sorted(self.roles):
            (self.offload if to_host else self.reload)(role)

    def pulse(self) -> None:
        """Show the followers that rank 0 lives, and find out whether they do."""
        _announce(Command.PULSE)

    def stop(self) -> None:
        """Let the followers exit."""
        _announce(Command.STOP)


class Writers:
    """Those threads, one of each rank, that write a checkpoint: they agree on whether every part of it is durable."""

    def __init__(self) -> None:
        """Collective."""
        # Of its own: training goes on in the others meanwhile.
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if world_size() > 1 else None

    def together(self, *phases: Write) -> None:
        """This rank's part, each phase after every rank is done with the one before. Raises OSError on every rank where
        any had one."""
        for phase in phases:
            problem: OSError | None = None
            try:
                with os_errors():
                    phase()
            except OSError as error:
                problem = error
            numbers = self._gather(problem.errno or errno.EIO if problem else 0)
            if problem is not None:
                raise problem
            for rank, number in enumerate(numbers):
                if number:
                    raise OSError(number, f"{os.strerror(number)} (rank {rank})")

    def _gather(self, number: int) -> list[int]:
        """Every rank's number; 0 is well."""
        if self._group is None:
            return [number]
        gathered = torch.zeros(world_size(), dtype=torch.int64)
        gathered[rank()] = number
        dist.all_reduce(gathered, group=self._group)
        return gathered.tolist()


def follow(build: Callable[[], Models], objectives: Mapping[str, LossFn]) -> None:
    """Do as rank 0 does until it says stop. Raises when rank 0 or another rank is gone."""
    models = build()
    writers = Writers()
    # Rank 0 finishes its step and saves before it lets the others go; a supervisor signals every rank at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as writer:
        writing: Future[None] | None = None
        while True:
            command, role, payload = _listen()
            if writing is not None and (writing.done() or command in (Command.SAVE, Command.STOP)):
                _written(writing)
                writing = None
            if command is Command.STOP:
                return
            if command is Command.SAVE:
                writing = writer.submit(_save(models, Path(payload.decode()), writers))
            else:
                _obey(models, objectives, command, role, payload)


def _obey(models: Models, objectives: Mapping[str, LossFn], command: Command, role: Role, payload: bytes) -> None:
    match command:
        case Command.TRAIN:
            temperature, norm, lr, name = _STEP_HEADER.unpack_from(payload)
            rows = decode(payload[_STEP_HEADER.size :])
            objective = objectives[name.rstrip(b"\0").decode()]
            models.learners[role].train_step(rows, objective, temperature=temperature, norm=norm, lr=lr)
        case Command.SCORE:
            temperature, *_ = _STEP_HEADER.unpack_from(payload)
            models.scorer(role).score(decode(payload[_STEP_HEADER.size :]), temperature=temperature)
        case Command.RESET:
            models.learners[role].reset_optimizer()
        case Command.TENSORS:
            deque(models.learners[role].named_tensors(), maxlen=0)
        case Command.LOAD:
            _load(models, Path(payload.decode()))
        case Command.EXPORT:
            models.learners[role].export(Path(payload.decode()))
        case Command.ADAPTER:
            _export_adapter(models, Path(payload.decode()))
        case Command.OFFLOAD:
            _offload(models, role)
        case Command.RELOAD:
            models.scorer(role).reload()
        case Command.PULSE | Command.STOP | Command.SAVE:
            pass


def _written(writing: "Future[None]") -> None:
    """The end of a write. Rank 0 knows as well when there was no room, and decides what becomes of the checkpoint."""
    try:
        writing.result()
    except OSError as error:
        log.error("part of a checkpoint not saved", rank=rank(), cause=str(error))


def _places(models: Models, folder: Path) -> dict[Role, Path]:
    """Each model that learns has a folder of its own."""
    return {role: folder / role.name.lower() for role in models.learners}


def _save(models: Models, folder: Path, writers: Writers) -> Write:
    writes: list[Write] = []
    for role, place in _places(models, folder).items():
        place.mkdir(exist_ok=True)
        writes.append(models.learners[role].save(place))
    dice, file = _dice(), folder / _dice_file()
    # Each model's part is collective for itself, so all ranks come to the next one or none does.
    return lambda: writers.together(*writes, lambda: save_file(dice, file), lambda: sync_tree(folder))


def _offload(models: Models, role: Role) -> None:
    models.scorer(role).offload()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # What torch keeps for itself no engine on the same GPU can have.


def _load(models: Models, folder: Path) -> None:
    for role, place in _places(models, folder).items():
        models.learners[role].load(place)
    # A rank that there was not when it was saved goes on with its own.
    if (file := folder / _dice_file()).is_file():
        _set_dice(load_file(file))


def _export_adapter(models: Models, folder: Path) -> None:
    policy = models.learners[Role.POLICY]
    assert isinstance(policy, AdapterBackend)
    policy.export_adapter(folder)


def _dice() -> dict[str, Tensor]:
    """The states of torch's generators of random numbers: on the CPU, and on this rank's GPU."""
    gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state(), **gpu}


def _set_dice(dice: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(dice["cpu"])
    if "cuda" in dice and torch.cuda.is_available():
        torch.cuda.set_rng_state(dice["cuda"])


def _dice_file() -> str:
    return f"rng-{rank()}.safetensors"


def _announce(command: Command, role: Role = Role.POLICY, payload: bytes = b"") -> None:
    if world_size() == 1:
        return
    dist.broadcast(torch.tensor([command, role, len(payload)], dtype=torch.int64), src=0)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)


def _listen() -> tuple[Command, Role, bytes]:
    header = torch.zeros(3, dtype=torch.int64)
    dist.broadcast(header, src=0)
    size = int(header[2])
    payload = torch.zeros(size, dtype=torch.uint8)
    if size:
        dist.broadcast(payload, src=0)
    return Command(int(header[0])), Role(int(header[1])), payload.numpy().tobytes()
