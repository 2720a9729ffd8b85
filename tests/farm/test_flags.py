"""The same configuration in other shapes, by flags alone; and other engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollfarm.ports import free_port
from tests.farm.conftest import CHECKOUT, StartFarm

DEMO = CHECKOUT / "examples" / "demo.toml"
SMALL = CHECKOUT / "tests" / "farm" / "small.toml"
STEPS = 40
SHORT = ("--run.steps", str(STEPS), "--up.min_gain", "0")
VLLM = Path(os.environ.get("ROLLFARM_VLLM_PYTHON", CHECKOUT / ".venv-vllm" / "bin" / "python"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_runs_synchronously(start_farm: StartFarm):
    status, summary = start_farm(SMALL, *SHORT, "--run.alpha", "0").finish(seconds=200)

    assert (status, summary["steps"], summary["max_staleness"]) == (0, STEPS, 0)


def test_it_runs_with_two_of_everything_that_scales(start_farm: StartFarm):
    two_of_each = ("--up.env_managers", "2", "--up.engines", "2", "--up.trainer_ranks", "2")
    farm = start_farm(SMALL, "--up.min_gain", "0", *two_of_each)

    def at_work() -> int:
        """Engines that serve trained weights and have generated; they start one after the other."""
        return sum(engine.policy_version > 0 and engine.generated_token_count > 0 for engine in farm.proxy().engines)

    farm.wait_for_step(2, seconds=120)
    counts = {module: len(farm.pids(module)) for module in ("env_manager", "llm_proxy.engine", "trainer")}
    farm.wait_until(lambda: len({t.worker_id for t in farm.trajectories(500)}) == 2, seconds=60)
    farm.wait_until(lambda: at_work() == 2, seconds=60)
    status, summary = farm.finish(seconds=250)

    assert counts == {"env_manager": 2, "llm_proxy.engine": 2, "trainer": 2}
    assert (status, summary["steps"]) == (0, 150)


@pytest.mark.skipif(not VLLM.exists(), reason="no real vLLM here: run `make vllm` first")
def test_it_runs_on_an_unmodified_vllm_server_by_changing_the_engine_alone(start_farm: StartFarm):
    vllm = ("--engine.adapter", "vllm", "--engine.vllm.python", str(VLLM))
    farm = start_farm(DEMO, "--run.steps", "20", "--up.min_gain", "0", *vllm)

    farm.wait_for_step(2, seconds=200)
    adapters = {engine.adapter for engine in farm.proxy().engines}
    status, summary = farm.finish(seconds=250)

    assert adapters == {"vllm"}
    assert (status, summary["steps"]) == (0, 20)
    assert summary["samples"] == 20 * 8 * 8


def test_the_example_of_an_environment_in_a_process_of_its_own_is_learned(start_farm: StartFarm):
    port = free_port()
    server = subprocess.Popen([sys.executable, str(CHECKOUT / "examples" / "coin_server.py"), "--port", str(port)])
    try:
        servers = json.dumps([f"127.0.0.1:{port}"])
        farm = start_farm(CHECKOUT / "examples" / "coin.toml", "--env_manager.servers", servers)
        farm.wait_for_step(1, seconds=90)
        answered = {turn.environment_id for t in farm.trajectories(100) for turn in t.turns} - {""}
        status, summary = farm.finish(seconds=200)
    finally:
        server.terminate()
        server.wait(timeout=20)

    assert answered == {f"127.0.0.1:{port}"}
    assert status == 0
    assert summary["reward_after"] - summary["reward_before"] >= 0.3
