"""What the trainer says of its algorithms without torch is what they are."""

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from rollfarm.config import ConfigError
from rollfarm.registry import outline, settings_model
from rollfarm.run import ModelConfig, RunConfig
from trainer.algorithm_config import BY_CRITIC, BY_TEACHER, Estimator
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.divergence import ESTIMATORS
from trainer.config import REGISTRIES, TrainerConfig, TrainerRoot


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_outline_of_a_registry_is_the_registry(kind: str) -> None:
    module, name = REGISTRIES[kind]
    registry = getattr(importlib.import_module(module), name)

    assert outline(module, name) == {key: list(settings_model(value).model_fields) for key, value in registry.items()}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_documents_have_a_row_for_every_algorithm(kind: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "configure.md").read_text()
    section = text.split(f"### `{kind}`", 1)[1].split("### ", 1)[0]

    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(outline(*REGISTRIES[kind]))


def test_names_that_the_configuration_knows_by_itself_are_those_of_the_algorithms() -> None:
    assert list(get_args(Estimator)) == list(ESTIMATORS)
    assert {*BY_CRITIC, *BY_TEACHER} <= ADVANTAGES.keys()


def test_a_function_of_ones_own_is_left_to_the_trainer() -> None:
    trainer = TrainerConfig(loss="my_lab.losses:spo", loss_settings={"beta": 0.1})

    TrainerRoot(model=ModelConfig(path="owner/name"), trainer=trainer).check()


def test_an_unknown_algorithm_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.loss: Unknown loss 'truncted'\. Did you mean 'truncated'\?"):
        TrainerRoot(trainer=TrainerConfig(loss="truncted")).check()


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps"])
def test_devices_are_known_by_their_kind_and_number(device: str) -> None:
    assert TrainerConfig(device=device).device == device

    with pytest.raises(ValidationError, match="is no device"):
        TrainerConfig(device=device + ":x")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_learning_rate_that_falls_until_the_end_needs_one(schedule: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").touch()
    records = [{"source": str(tmp_path / "records.jsonl")}]

    def check(steps: int, **settings: object) -> None:
        trainer = TrainerConfig.model_validate({"lr_schedule": schedule, **settings})
        TrainerRoot(model=ModelConfig(path="owner/name"), run=RunConfig(steps=steps), trainer=trainer).check()

    check(5)
    check(0, offline={"records": records, "epochs": 2})
    for endless in ({}, {"offline": {"records": records}}):
        with pytest.raises(ConfigError, match=r"trainer\.lr_schedule: .* Set run\.steps, or choose 'constant'"):
            check(0, **endless)
