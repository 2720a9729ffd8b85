"""Bad input ends `rollfarm up` with a clear error, a remedy and a status, and leaves nothing behind."""

import json
import socket
from pathlib import Path

import psutil
import pytest

from tests.farm.conftest import CHECKOUT, Farm, StartFarm

SMALL = CHECKOUT / "tests" / "farm" / "small.toml"


def ended(farm: Farm) -> tuple[int, str]:
    """The status of a farm that had no result, and what it wrote on stderr."""
    status, out, said = wholly_ended(farm, seconds=60)
    assert out == ""
    return status, said


def wholly_ended(farm: Farm, *, seconds: float) -> tuple[int, str, str]:
    """The farm's status and what it wrote on stdout and stderr, once every process of it is gone."""
    out, _ = farm.process.communicate(timeout=seconds)
    left = [process.pid for process in psutil.process_iter() if str(farm.run) in _argv(process)]
    assert left == []
    return farm.process.returncode, out, (farm.run.parent / f"{farm.run.name}.stderr").read_text()


def test_an_unknown_key_names_the_nearest_valid_one(start_farm: StartFarm, tmp_path: Path):
    file = tmp_path / "farm.toml"
    file.write_text(SMALL.read_text().replace("checkpoint_every", "checkpont_every"))

    status, said = ended(start_farm(file))

    assert status == 2
    assert "trainer.checkpont_every: unknown key. Did you mean 'checkpoint_every'?" in said
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_named_with_a_remedy(start_farm: StartFarm, tmp_path: Path):
    file = tmp_path / "farm.toml"
    head, _, tail = SMALL.read_text().partition("[model.create]")
    file.write_text(head + "[sample_buffer]" + tail.partition("[sample_buffer]")[2])

    status, said = ended(start_farm(file, "--model.path", "/no/such/model"))

    assert status == 2
    assert "model.path: /no/such/model does not exist. Give a folder in Hugging Face format" in said


def test_a_port_in_use_is_named_with_a_remedy(start_farm: StartFarm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        status, said = ended(start_farm(SMALL, base_port=port - 3))

    assert status == 3
    assert str(port) in said
    assert "up.base_port" in said


def test_a_domain_that_nothing_scores_is_named(start_farm: StartFarm, tmp_path: Path):
    file = tmp_path / "farm.toml"
    file.write_text(SMALL.read_text().replace("reward_gateway.domains.lake", "reward_gateway.domains.pond"))

    status, said = ended(start_farm(file))

    assert status == 2
    assert "nothing scores 'lake'. Add [reward_gateway.domains.lake]" in said


@pytest.mark.slow
def test_a_redis_that_does_not_answer_is_named_with_a_remedy(start_farm: StartFarm):
    url = "redis://:hush@127.0.0.1:1/0"
    farm = start_farm(SMALL, "--sample_buffer.journal", url, "--sample_buffer.connect_seconds", "1")

    status, said = ended(farm)

    assert status == 2
    assert "redis://***@127.0.0.1:1/0" in said
    assert "Start Redis" in said
    written = [path.read_text() for path in (*farm.run.glob("*.*"), *farm.run.glob("logs/*"))]
    assert not any("hush" in text for text in (said, *written))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "reason", "cause"),
    [
        (
            'environment = "frozen_lake"\nsettings = { size = 3, view = "compact" }',
            'environment = "tests.farm.broken:Raises"',
            "every environment has been suspended",
            "the ice is broken",
        ),
        (
            'name = "environment"',
            'name = "tests.farm.broken:not_a_number"',
            "groups in a row were dropped because their episodes failed",
            "nan",
        ),
    ],
    ids=["an environment that raises", "a reward that is NaN"],
)
def test_a_farm_whose_every_episode_fails_gives_up_with_the_cause(
    start_farm: StartFarm, tmp_path: Path, old: str, new: str, reason: str, cause: str
):
    file = tmp_path / "farm.toml"
    text = SMALL.read_text()
    assert old in text
    file.write_text(text.replace(old, new))

    farm = start_farm(file, "--run.max_attempts", "2")
    status, out, said = wholly_ended(farm, seconds=100)

    assert status == 1
    result = json.loads(out.splitlines()[-1])
    assert (result["ending"], result["finished"], result["steps"]) == ("failed", False, 0)
    assert reason in said
    assert cause in said.split("The last failure was")[1]
    assert "Mend the environment or the reward" in said


def test_a_finished_run_is_not_begun_again_in_silence(start_farm: StartFarm, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / "summary.json").write_text(json.dumps({"finished": True, "steps": 150}))

    status, said = ended(start_farm(SMALL))

    assert status == 2
    assert "is finished (150 steps)" in said


def _argv(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
