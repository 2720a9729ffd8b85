"""Packing, micro-batches and ranks change neither loss nor gradient, for every aggregation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollfarm.ports import free_port
from tests.trainer.conftest import ROOT
from tests.trainer.gradients import ROWS, SETTINGS, gradients, load
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.backends.scoring import load_model
from trainer.config import TrainerConfig
from trainer.objective import policy_objective

SECONDS = 200.0


@pytest.fixture(scope="module")
def at_once(model_path: Path) -> dict[str, Tensor]:
    """All rows in one micro-batch."""
    return gradients(load(str(model_path)), 10_000)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() == SETTINGS.keys()
    for name, values in expected.items():
        assert values[1:].abs().max() > 1e-3, name
        assert torch.allclose(found[name], values, rtol=0, atol=1e-5), name


@pytest.mark.parametrize("token_budget", [1, 40])
def test_micro_batches_of_one_row_or_of_some_give_the_same(
    model_path: Path, at_once: dict[str, Tensor], token_budget: int
) -> None:
    assert_alike(gradients(load(str(model_path)), token_budget), at_once)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_rows_that_are_packed_give_what_each_gives_alone(
    model_path: Path, at_once: dict[str, Tensor], name: str
) -> None:
    """By a forward pass of Hugging Face's for each row, and the objective's formula."""
    model = load_model(str(model_path))
    objective = policy_objective(TrainerConfig.model_validate(SETTINGS[name]))
    total = torch.zeros(())
    for row in ROWS:
        if not row.policy_tokens:
            continue
        ids = torch.from_numpy(row.ids_T).long()
        logp_T = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        logp_P = logp_T[torch.from_numpy(row.mask_T[1:])]
        ratio_P = (logp_P - torch.from_numpy(row.behavior_logp_P)).exp()
        advantage_P = torch.from_numpy(row.advantage_P)
        surrogate_P = torch.minimum(ratio_P * advantage_P, ratio_P.clamp(0.8, 1.28) * advantage_P)
        surrogate_P = torch.where(advantage_P < 0, torch.maximum(surrogate_P, 3 * advantage_P), surrogate_P)
        weight, _ = objective.aggregation(torch.tensor([row.policy_tokens]))
        total = total - (surrogate_P * weight).sum()
    loss = total / objective.norm(ROWS)
    loss.backward()

    grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    expected = torch.cat([loss.detach()[None], *grads])
    assert torch.allclose(at_once[name], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_two_ranks_give_what_one_gives(model_path: Path, tmp_path: Path, at_once: dict[str, Tensor]) -> None:
    port, command = free_port(), [sys.executable, "-m", "tests.trainer.gradients", str(model_path), str(tmp_path), "40"]
    rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=SECONDS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

    assert_alike(load_file(tmp_path / "gradients.safetensors"), at_once)
