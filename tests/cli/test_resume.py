"""`rollfarm resume` finds runs, and says clearly what cannot be gone on with."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollfarm.config import ConfigError
from rollfarm.run import RunConfig
from rollfarm.up import folder, resume
from rollfarm.up.claims import claimed
from rollfarm.up.config import FarmRoot, as_used, write_toml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the runs "lake" and "river" in runs/."""
    monkeypatch.chdir(tmp_path)
    for name in ("lake", "river"):
        begin(Path("runs"), name)
    return tmp_path


def begin(folder: Path, name: str) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    write_toml(as_used(FarmRoot(run=RunConfig(folder=folder, name=name))), run / "config.toml")
    return run


@pytest.mark.parametrize("said", ["lake", "runs/lake", "runs/lake/", "runs/lake/config.toml"])
def test_a_run_is_named_or_pointed_at(place: Path, said: str) -> None:
    assert resume.arguments([said, "--run.steps", "9"]) == ["runs/lake/config.toml", "--run.steps", "9"]


def test_an_unknown_run_is_refused_with_those_that_there_are(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"lak: no such run\. Did you mean 'lake'\? Known: lake, river"):
        resume.arguments(["lak"])


def test_where_there_are_no_runs_the_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=f"There is none in {tmp_path}/runs"):
        resume.arguments(["lake"])


def test_a_folder_that_no_run_made_is_refused(place: Path) -> None:
    (place / "thesis").mkdir()

    with pytest.raises(ConfigError, match=r"no run's folder: it has no config.toml"):
        resume.arguments(["thesis"])


def test_a_run_whose_folder_was_moved_goes_on_where_it_is(place: Path) -> None:
    begin(place / "old", "brook")
    (place / "old").rename(place / "new")

    assert resume.arguments(["new/brook"]) == ["new/brook/config.toml", "--run.folder", f"{place}/new"]


def test_a_run_whose_folder_was_renamed_is_refused(place: Path) -> None:
    (place / "runs" / "lake").rename(place / "runs" / "sea")

    with pytest.raises(ConfigError, match=f"this is the run 'lake'.* Rename the folder to {place}/runs/lake"):
        resume.arguments(["sea"])


def test_a_run_goes_on_from_the_folder_in_which_it_was_begun(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")

    with pytest.raises(ConfigError, match=f"Go there first: cd {place}"):
        resume.arguments([str(place / "runs" / "lake")])


@pytest.mark.parametrize("flags", [["--up.fresh", "true"], ["--up.fresh=true"], ["--run.name", "sea"]])
def test_what_would_begin_another_run_is_refused(place: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0].partition("=")[0]):
        resume.arguments(["lake", *flags])


def test_a_finished_run_is_refused_with_the_ways_to_go_on(farm_file: Path, tmp_path: Path) -> None:
    run = begun(farm_file, tmp_path)
    (run / "summary.json").write_text('{"finished": true, "steps": 100}')

    refused = rollfarm_resume(run)

    assert refused.returncode == 2
    assert refused.stderr.startswith("rollfarm resume: ")
    assert "is finished (100 steps)" in refused.stderr
    assert "--run.steps 200" in refused.stderr


def test_a_run_that_another_farm_works_on_is_refused(farm_file: Path, tmp_path: Path) -> None:
    run = begun(farm_file, tmp_path)
    (run / folder.LOCK).touch()

    with claimed(run / folder.LOCK) as claim:
        refused = rollfarm_resume(run)

    assert claim is not None
    assert refused.returncode == 1
    assert "Another `rollfarm up` works on" in refused.stderr


def begun(farm_file: Path, tmp_path: Path) -> Path:
    """A run as `rollfarm up` leaves it that was interrupted before anything happened."""
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(farm_file.read_text())
    return run


def rollfarm_resume(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollfarm", "resume", *map(str, arguments), "--up.base_port", "18700"]
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
    )
