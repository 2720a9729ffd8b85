import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rollfarm.config import ConfigError
from rollfarm.run import RECIPE, ModelConfig, RunConfig, TinyModelConfig
from rollfarm.up import folder
from rollfarm.up.config import FarmRoot, UpConfig


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "my bin" / "rollfarm"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What an earlier part of a run left."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text("")
    return run


def begun_anew(run: Path, fresh: object) -> bool:
    farm = FarmRoot(
        run=RunConfig(folder=run.parent, name=run.name, steps=40), up=UpConfig.model_validate({"fresh": fresh})
    )
    folder.refuse_finished(farm)
    with folder.opened(farm) as (resumed, _):
        assert resumed is (run / "checkpoints").exists()
        return not resumed


def test_a_program_off_the_path_is_named_as_it_was_started(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program), "up"])

    command = folder.resume_command(Path("runs/the lake"))

    assert command == f"'{program}' resume 'runs/the lake'"


def test_a_program_on_the_path_is_called_by_its_name(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(sys, "argv", [str(program), "up"])

    assert folder.resume_command(Path("runs/lake")) == "rollfarm resume runs/lake"


def test_a_module_is_run_by_the_same_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/checkout/rollfarm/__main__.py", "up"])

    assert folder.resume_command(Path("runs/lake")) == f"{sys.executable} -m rollfarm resume runs/lake"


@pytest.mark.parametrize(("fresh", "anew"), [(False, False), ("finished", False), (True, True)])
def test_an_unfinished_run_goes_on_unless_a_fresh_one_is_asked_for(earlier: Path, fresh: object, anew: bool) -> None:
    (earlier / "summary.json").write_text(json.dumps({"finished": False, "steps": 30}))

    assert begun_anew(earlier, fresh) is anew


@pytest.mark.parametrize("fresh", ["finished", True])
def test_a_finished_run_is_begun_anew_where_that_is_asked_for(earlier: Path, fresh: object) -> None:
    (earlier / "summary.json").write_text(json.dumps({"finished": True, "steps": 40}))

    assert begun_anew(earlier, fresh)


def test_a_finished_run_that_shall_have_more_steps_goes_on(earlier: Path) -> None:
    (earlier / "summary.json").write_text(json.dumps({"finished": True, "steps": 30}))

    assert not begun_anew(earlier, "finished")


def test_a_run_on_records_is_no_farm_s(earlier: Path) -> None:
    (earlier / "config.toml").write_text("[trainer.offline]\n")

    with pytest.raises(ConfigError, match="is a run of `rollfarm train`"):
        begun_anew(earlier, False)
    assert (earlier / "config.toml").read_text() == "[trainer.offline]\n"
    assert begun_anew(earlier, True)


@pytest.mark.parametrize(("name", "kept"), [("run", True), ("new", False)])
def test_a_model_of_other_settings_is_made_anew_only_with_a_run_that_begins(
    earlier: Path, tmp_path: Path, name: str, kept: bool
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    (model / RECIPE).write_text('{"words": "left right"}')
    farm = FarmRoot(
        run=RunConfig(folder=earlier.parent, name=name),
        up=UpConfig(fresh="finished"),
        model=ModelConfig(path=str(model), create=TinyModelConfig(words="up down")),
    )

    with pytest.raises(ConfigError, match="other settings") if kept else nullcontext(), folder.opened(farm):
        pass

    assert model.exists() is kept


def test_the_demo_goes_on_with_an_interrupted_run() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()

    assert "rollfarm up examples/demo.toml --up.fresh finished\n" in makefile
