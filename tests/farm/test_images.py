"""A farm whose environment shows pictures, to a model that sees them: the example, with a real vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.farm.conftest import CHECKOUT, StartFarm
from tests.farm.test_flags import VLLM

ALIKE = 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not VLLM.exists(), reason="no real vLLM here: run `make vllm` first")
def test_it_learns_to_name_what_it_sees_and_vllm_sees_what_the_trainer_sees(
    start_farm: StartFarm, tmp_path: Path
) -> None:
    model, example = tmp_path / "model", CHECKOUT / "examples" / "colour"
    subprocess.run([sys.executable, example.with_suffix(".py"), "--out", model], check=True)
    flags = ["--engine.vllm.python", str(VLLM), "--run.alpha", "0"]
    farm = start_farm(example.with_suffix(".toml"), *flags, model=model)

    status, summary = farm.finish(seconds=250)

    assert status == 0, f"success rose by less than the example asks for: {summary}"
    lines = [json.loads(line) for line in (farm.run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert summary["samples"] == 64 * len(steps)
    assert {step["staleness_max"] for step in steps} == {0}, "each is of the weights that it is trained on"
    assert max(step["behavior_gap_max"] for step in steps) < ALIKE
