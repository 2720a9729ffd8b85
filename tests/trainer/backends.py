"""Backends as processes that meet by torch.distributed, and what they answer: see tests/trainer/rank.py."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfarm.ports import free_port
from tests.trainer.conftest import ROOT

SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What rank 0 said, and where it left its model."""

    steps: list[dict[str, float]]
    logprobs: list[float]
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


def start(
    model: Path,
    folder: Path,
    steps: str,
    config: dict[str, Any],
    *,
    world_size: int = 1,
    rows: int = 9,
    save_before: int | None = None,
    dtype: str = "float32",
) -> list["subprocess.Popen[str]"]:
    """The ranks of one trainer. It saves before the step `save_before`, and goes on."""
    settings = json.dumps({"device": "cpu", "lr": 1e-2, **config})
    command = [sys.executable, "-m", "tests.trainer.rank", str(model), str(folder), settings, steps, str(rows)]
    command += ["" if save_before is None else str(save_before), dtype]
    return start_ranks(command, world_size)


def start_ranks(command: Sequence[str], world_size: int) -> list["subprocess.Popen[str]"]:
    """Processes that meet."""
    port = free_port()

    def rank(number: int) -> "subprocess.Popen[str]":
        rendezvous = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in (rendezvous | meeting).items()}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return [rank(number) for number in range(world_size)]


def train(
    model: Path,
    folder: Path,
    steps: str,
    config: dict[str, Any],
    *,
    world_size: int = 1,
    rows: int = 9,
    save_before: int | None = None,
    dtype: str = "float32",
) -> Trained:
    """What the ranks came to."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = start(model, folder, steps, config, world_size=world_size, rows=rows, save_before=save_before, dtype=dtype)
    return answer_of(ranks, folder)


def answer_of(ranks: Sequence["subprocess.Popen[str]"], folder: Path) -> Trained:
    """What rank 0 said when all had ended."""
    try:
        outputs = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), [errors for _, errors in outputs]
    answer = json.loads(outputs[0][0].splitlines()[-1])
    return Trained(answer["steps"], answer["logprobs"], folder)
