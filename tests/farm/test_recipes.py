"""Recipes of examples/recipes: all are read, and some train a real farm, as `rollfarm up FARM RECIPE` does."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.farm.conftest import CHECKOUT, StartFarm
from trainer.config import TrainerConfig

EASY = CHECKOUT / "tests" / "farm" / "easy.toml"
RECIPES = sorted((CHECKOUT / "examples" / "recipes").glob("*.toml"))
TAUGHT = "opd"
"""The recipe that needs a teacher."""

PLAYED = ("dapo", "decoupled_ppo", "gspo", "ppo")
"""One for each way through the trainer: a farm takes half a minute. The others differ in names and settings."""

LR = {"gspo": "3e-2"}
"""Where bounds are so tight that the easy task's five steps need longer ones."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_named_in_the_documents(recipe: Path):
    assert f"`{recipe.stem}`" in (CHECKOUT / "docs" / "recipes.md").read_text()
    TrainerConfig.model_validate(
        tomllib.loads(recipe.read_text())["trainer"] | ({"teacher": {"path": "x"}} if recipe.stem == TAUGHT else {})
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem in PLAYED], ids=lambda path: path.stem)
def test_five_steps_of_a_recipe_earn_more(start_farm: StartFarm, recipe: Path):
    flags = ["--trainer.lr", LR.get(recipe.stem, "1e-2")]
    if recipe.stem == "ppo":
        flags += ["--trainer.critic.lr", "1e-2"]

    farm = start_farm([EASY, recipe], *flags)
    status, summary = farm.finish(seconds=200)

    rewards = [step["mean_reward"] for step in _steps(farm.run)]
    assert (status, summary["steps"]) == (0, 5)
    assert rewards[-1] > rewards[0] + 0.05


def _steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]
