"""Two ranks as real processes that meet by gloo."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollfarm.ports import free_port
from tests.trainer.conftest import ROOT, make_backend, random_rows
from trainer.config import TrainerConfig
from trainer.objective import policy_objective

pytestmark = pytest.mark.slow


def start(rank: int, port: int, *arguments: str) -> "subprocess.Popen[str]":
    rendezvous = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.rank", *arguments],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in rendezvous.items()}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks_learn_exactly_what_one_learns(model_path: Path, tmp_path: Path) -> None:
    port = free_port()
    ranks = [start(rank, port, str(model_path), str(tmp_path), "3") for rank in range(2)]
    objective = policy_objective(TrainerConfig())
    alone, expected = make_backend(model_path), {}
    for seed in range(3):
        rows = random_rows(9, seed=seed)
        expected = alone.train_step(rows, objective, temperature=0.8, norm=objective.norm(rows), lr=1e-2)

    outputs = [rank.communicate(timeout=90) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], [errors for _, errors in outputs]
    assert json.loads(outputs[0][0]) == pytest.approx(expected, abs=1e-5)
    together = make_backend(model_path)
    together.load(tmp_path)
    for (name, one), (_, two) in zip(alone.export_named_tensors(), together.export_named_tensors(), strict=True):
        assert torch.allclose(one, two, atol=1e-4), name


def test_a_batch_of_fewer_rows_than_ranks_is_trained_on_too(model_path: Path, tmp_path: Path) -> None:
    port = free_port()
    ranks = [start(rank, port, str(model_path), str(tmp_path), "1", "1") for rank in range(2)]

    outputs = [rank.communicate(timeout=90) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], [errors for _, errors in outputs]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_other_down(model_path: Path, tmp_path: Path, victim: int) -> None:
    port = free_port()
    ranks = [start(rank, port, str(model_path), str(tmp_path), "forever") for rank in range(2)]
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline().strip() == "begun"

    ranks[victim].send_signal(signal.SIGKILL)

    assert ranks[1 - victim].wait(timeout=60) not in (0, None)
    for rank in ranks:
        rank.communicate()
