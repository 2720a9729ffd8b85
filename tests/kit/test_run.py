from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollfarm.config import ConfigError
from rollfarm.run import RECIPE, DomainConfig, ModelConfig, RunConfig, SamplingConfig, TinyModelConfig


def test_the_spec_that_sample_buffer_gets_is_the_configuration():
    run = RunConfig(
        name="a",
        alpha=0.5,
        steps=7,
        domains=[DomainConfig(name="lake", environment="frozen_lake", settings={"size": 4, "goal": "far"})],
        sampling=SamplingConfig(max_tokens=3),
        lease_seconds=1.5,
    )

    spec = run.to_proto()

    assert (spec.run_id, spec.alpha, spec.step_count) == ("a", 0.5, 7)
    assert spec.domains[0].settings_json == '{"goal": "far", "size": 4}'
    assert spec.validation_sampling.max_tokens == 3
    assert spec.lease_duration.ToTimedelta().total_seconds() == 1.5


def test_a_run_name_that_cannot_be_a_folder_is_refused():
    with pytest.raises(ValidationError, match="name"):
        RunConfig(name="../elsewhere")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}])
def test_sampling_that_the_trainer_cannot_weigh_is_for_validation_alone(sampling: dict[str, Any]):
    cut = SamplingConfig.model_validate(sampling)

    with pytest.raises(ValidationError, match=r"in run\.validation_sampling alone"):
        RunConfig(sampling=cut)

    run = RunConfig(sampling=SamplingConfig(temperature=0.7), validation_sampling=cut)
    assert run.to_proto().sampling.temperature == 0.7


def test_two_domains_of_one_name_are_refused():
    domains = [DomainConfig(name="lake", environment=name) for name in ("frozen_lake", "guess_number")]

    with pytest.raises(ValidationError, match="two are named 'lake'"):
        RunConfig(domains=domains)


CREATE = TinyModelConfig(words="left right")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and the home folder, with a model, an empty folder and another one in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "empty", "owner"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "owner" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "create"),
    [
        ("model", None),
        ("~/model", None),
        ("model", CREATE),
        ("empty", CREATE),
        ("nowhere", CREATE),
        ("somebody/model-0.5B", None),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_model_is_a_folder_or_is_made_or_comes_from_the_hub(path: str, create: TinyModelConfig | None):
    ModelConfig(path=path, create=create).check()


@pytest.mark.parametrize(
    ("path", "create", "message"),
    [
        ("", None, "missing"),
        ("", CREATE, "missing"),
        ("empty", None, "is there and holds no model"),
        ("owner", CREATE, "is there and holds no model"),
        ("owner/notes.txt", CREATE, "is there and holds no model"),
        ("owner/model", None, r"does not exist\..* add \[model\.create\]"),
        ("nowhere", None, "does not exist"),
        ("./some/where", None, "does not exist"),
        ("~/nowhere", None, "does not exist"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_no_model_is_refused_with_a_remedy(path: str, create: TinyModelConfig | None, message: str):
    with pytest.raises(ConfigError, match=rf"model\.path: .*{message}"):
        ModelConfig(path=path, create=create).check()


def test_home_is_the_same_for_everyone_who_reads_the_path(here: Path):
    assert ModelConfig(path="~/model").path == str(here / "model")


def test_a_recipe_of_before_a_setting_came_is_still_the_same(here: Path):
    recipe = here / "model" / RECIPE
    recipe.write_text('{"words": "left right"}')

    assert not ModelConfig(path="model", create=CREATE).is_outdated
    assert ModelConfig(path="model", create=CREATE.model_copy(update={"layers": 3})).is_outdated

    recipe.write_text("not a recipe")

    assert ModelConfig(path="model", create=CREATE).is_outdated
