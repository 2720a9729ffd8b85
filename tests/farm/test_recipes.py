"""Recipes of examples/recipes: each trains a real farm, as `rollfarm up FARM RECIPE` does."""

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollfarm.run import ModelConfig
from tests.farm.conftest import CHECKOUT, StartFarm
from tests.farm.easy import PAID, TURNS
from trainer.config import TrainerConfig, TrainerRoot

EASY = CHECKOUT / "tests" / "farm" / "easy.toml"
RECIPES = sorted((CHECKOUT / "examples" / "recipes").glob("*.toml"))
TAUGHT = CHECKOUT / "examples" / "recipes" / "opd.toml"
"""The recipe that needs a teacher."""

FLAGS = {
    "gspo": ("--trainer.lr", "3e-2"),  # Its bounds are so tight that five steps have to be longer ones.
    "ppo": ("--trainer.critic.lr", "1e-2"),
}
"""What a recipe needs to learn the easy task within five steps."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_named_in_the_documents(recipe: Path):
    assert f"`{recipe.stem}`" in (CHECKOUT / "docs" / "recipes.md").read_text()
    TrainerConfig.model_validate(
        tomllib.loads(recipe.read_text())["trainer"] | ({"teacher": {"path": "x"}} if recipe == TAUGHT else {})
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first farm makes the model with which all begin."""
    return tmp_path_factory.mktemp("models") / "easy"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [path for path in RECIPES if path != TAUGHT], ids=lambda path: path.stem)
def test_five_steps_of_a_recipe_earn_more(start_farm: StartFarm, model: Path, recipe: Path):
    farm = start_farm([EASY, recipe], *FLAGS.get(recipe.stem, ()), model=model)
    status, summary = farm.finish(seconds=200)

    rewards = [step["mean_reward"] for step in _steps(farm.run)]
    assert (status, summary["steps"]) == (0, 5)
    assert rewards[-1] > rewards[0] + 0.05


@pytest.mark.slow
def test_five_steps_of_distillation_come_nearer_to_the_teacher(start_farm: StartFarm, model: Path, tmp_path: Path):
    teacher = tmp_path / "teacher"
    _teach(teacher, tmp_path / "lessons.jsonl")

    farm = start_farm([EASY, TAUGHT], "--trainer.teacher.path", str(teacher), model=model)
    status, summary = farm.finish(seconds=200)

    steps = _steps(farm.run)
    gaps = [step["metrics"]["kl_teacher"] for step in steps]
    assert (status, summary["steps"]) == (0, 5)
    assert 0 < gaps[-1] < 0.6 * gaps[0]
    assert steps[-1]["mean_reward"] > steps[0]["mean_reward"] + 0.05


def _teach(folder: Path, lessons: Path) -> None:
    """Make a model that mostly says what is paid, by showing it, from another seed than the farm's."""
    from trainer.create_model import ensure_model
    from trainer.learner import build_learner

    model = ModelConfig.model_validate(tomllib.loads(EASY.read_text())["model"] | {"path": str(folder.parent / "new")})
    assert model.create is not None
    ensure_model(model.model_copy(update={"create": model.create.model_copy(update={"seed": 1})}))

    lessons.write_text("\n".join(json.dumps(_lesson(random.Random(seed))) for seed in range(32)))
    warm_start = {"data": lessons, "steps": 30, "batch_size": 16, "lr": 1e-2}
    root = TrainerRoot.model_validate({"model": {"path": model.path}, "trainer": {"warm_start": warm_start}})
    learner = build_learner(root)
    for _ in learner.warm_start():
        pass
    learner.export(folder)


def _lesson(dice: random.Random) -> dict[str, Any]:
    said = [("user", f"at {turn}") for turn in range(TURNS)], [("assistant", _word(dice)) for _ in range(TURNS)]
    return {"messages": [{"role": role, "content": text} for turn in zip(*said, strict=True) for role, text in turn]}


def _word(dice: random.Random) -> str:
    return dice.choice(sorted(PAID))


def _steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]
