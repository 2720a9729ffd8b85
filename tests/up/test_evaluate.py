import json
from pathlib import Path

import pytest

from rollfarm.up.config import load_farm
from rollfarm.up.evaluate import MODULE, as_evaluation, show
from rollfarm.up.farm import plan


def test_an_evaluation_has_a_run_of_its_own_and_a_counter_in_the_trainer_s_place(farm_file: Path) -> None:
    farm = as_evaluation(load_farm([str(farm_file), "--up.trainer_ranks", "4", "--up.min_gain", "0.3"]))

    planned = plan(farm, sockets=Path("/tmp/s"), environ={}, python="python", trainer=MODULE)

    assert farm.run.name == "small-evaluation"
    assert as_evaluation(farm).run.name == "small-evaluation"
    assert farm.up.min_gain == 0
    assert [spec.argv[2] for spec in planned.specs if spec.name.startswith("trainer")] == ["trainer.evaluation"]
    assert planned.specs[-1].argv[3].endswith("small-evaluation/config.toml")


def test_a_result_is_a_table_for_people_and_its_last_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    part = {
        "tasks": 3,
        "episodes": 12,
        "avg@4": {"value": 0.5, "low": 0.25, "high": 0.75},
        "pass@1": {"value": 1.0, "low": None, "high": None},
    }
    result = {"model": "m", "metric": "success", "threshold": 1.0, "dropped_groups": {"failed": 2}}
    result |= {"domains": {"maths": part}, "all": part}

    show(result)

    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "maths" in line)
    assert "0.500 [0.250, 0.750]" in row
    assert "1.000" in row
    assert "2 failed" in lines[-2]
    assert json.loads(lines[-1]) == result
