"""Backends of several ranks learn from images what plain torch in one process learns."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfarm import images
from tests.trainer.backends import Trained, answer_of, start_ranks
from tests.trainer.vision_rank import rows_at
from tests.vision import Reference, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", "qwen3_vl")


def train(model: Path, folder: Path, config: dict[str, Any], *, world_size: int) -> Trained:
    settings = json.dumps({"device": "cpu", "lr": 1e-3, "micro_batch_tokens": 20, **config})
    command = [sys.executable, "-m", "tests.trainer.vision_rank", str(model), str(folder), settings]
    return answer_of(start_ranks(command, world_size), folder)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(model, tmp_path_factory.mktemp("alone"), {}, world_size=1)


def test_an_exported_model_says_what_its_trainer_said_and_has_its_image_processor(model: Path, alone: Trained) -> None:
    reference = Reference(alone.folder)
    expected: list[float] = []
    for row in rows_at(model):
        logp_TV = reference.logprobs(row.ids_T, row.images)
        at_P = row.mask_T.nonzero()[0]
        expected += logp_TV[at_P - 1, row.ids_T[at_P]].tolist()

    assert np.abs(np.array(expected) - alone.logprobs).max() < 1e-4
    assert images.load(str(alone.folder)) is not None
    assert len({step["loss"] for step in alone.steps}) == len(alone.steps)


@pytest.mark.parametrize(
    "config",
    [{}, {"backend": "fsdp2"}, {"backend": "deepspeed", "deepspeed": {"stage": 3, "whole_up_to": 0}}],
    ids=["torch", "fsdp2", "zero3"],
)
def test_two_ranks_learn_what_one_does(model: Path, alone: Trained, tmp_path: Path, config: dict[str, Any]) -> None:
    both = train(model, tmp_path / "export", config, world_size=2)

    assert both.losses == pytest.approx(alone.losses, rel=1e-3, abs=1e-5)
    assert np.abs(np.array(both.logprobs) - alone.logprobs).max() < 1e-4
