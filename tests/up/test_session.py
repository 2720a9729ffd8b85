"""However a farm ends, it says what came of it: a session over one real process that answers as a trainer would."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from rollfarm.ports import free_port
from rollfarm.run import RunConfig
from rollfarm.service import SUPERVISED
from rollfarm.up.config import FarmRoot, UpConfig
from rollfarm.up.farm import Addresses, Plan, ProcessSpec
from rollfarm.up.session import Session

CHILD = str(Path(__file__).parent / "child.py")
ENV = {SUPERVISED: "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def session(folder: Path, phase: str, then: str = "stay", **up: float | str) -> Session:
    port = free_port()
    address = f"127.0.0.1:{port}"
    trainer = ProcessSpec(
        "trainer", (sys.executable, CHILD, "trainer", str(port), phase, then), stage=0, address=address, env=ENV
    )
    farm = FarmRoot(
        run=RunConfig(folder=folder, name="run"),
        up=UpConfig.model_validate({"console": "off", "max_restarts": 0, "drain_seconds": 10, **up}),
    )
    (farm.run.path / "logs").mkdir(parents=True)
    nowhere = "127.0.0.1:1"
    return Session(farm, Plan((trainer,), Addresses(nowhere, nowhere, nowhere, address, (), ())), resumed=False)


def told(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, object], str]:
    """The last line on stdout, and all of stderr."""
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


async def test_a_farm_that_fails_after_hours_still_says_what_came_of_it(tmp_path: Path, capsys):
    status = await session(tmp_path, "PHASE_TRAINING", "crash", min_gain=0.3).run()

    result, said = told(capsys)
    assert status == 7
    assert (result["ending"], result["finished"], result["steps"]) == ("failed", False, 2)
    assert "trainer ended with exit status 7" in said
    assert "Go on with:" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rewards"] == [0.5, 0.5]
    assert (tmp_path / "run" / "report.html").exists()


async def test_a_farm_that_fails_before_the_trainer_began_has_only_an_error(tmp_path: Path, capsys):
    status = await session(tmp_path, "PHASE_LOADING", "crash").run()

    out, said = capsys.readouterr()
    assert status == 7
    assert out == ""
    assert "trainer ended with exit status 7" in said
    assert not (tmp_path / "run" / "summary.json").exists()


async def test_a_run_that_its_time_limit_ends_has_not_failed(tmp_path: Path, capsys):
    farm = session(tmp_path, "PHASE_TRAINING", time_limit_seconds=3, metric="success", min_gain=2)

    status = await farm.run()

    result, said = told(capsys)
    assert status == 0
    assert (result["ending"], result["finished"]) == ("time limit", False)
    assert "Go on with:" in said


async def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path, capsys):
    farm = session(tmp_path, "PHASE_TRAINING")
    running = asyncio.create_task(farm.run())
    async with asyncio.timeout(30):
        while not farm.picture.steps:  # noqa: ASYNC110 - the screen polls the picture too
            await asyncio.sleep(0.05)

    os.kill(os.getpid(), signal.SIGINT)

    assert await running == 130
    result, _ = told(capsys)
    assert (result["ending"], result["steps"]) == ("interrupted", 2)


@pytest.mark.parametrize(
    ("metric", "min_gain", "status", "says"),
    [
        ("success", 1.0, 0, "1.000 after"),
        ("success", 1.5, 1, "The success did not rise by 1.5."),
        ("sucess", 0.3, 1, "the sucess was not measured; known: reward, success."),
        ("sucess", 0.0, 0, "not measured; known: reward, success"),
        ("reward", 0.0, 0, "1.100 after"),
    ],
)
async def test_a_finished_run_is_judged_by_its_measure(
    tmp_path: Path, capsys, metric: str, min_gain: float, status: int, says: str
):
    farm = session(tmp_path, "PHASE_FINISHED", metric=metric, min_gain=min_gain)

    assert await farm.run() == status

    result, said = told(capsys)
    assert (result["ending"], result["metric"]) == ("finished", metric)
    assert says in said
