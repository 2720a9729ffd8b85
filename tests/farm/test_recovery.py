"""kill -9 of any one service: the farm recovers and finishes, and the ledger's promises hold."""

import json
import os
import signal

import psutil
import pytest

from tests.farm.conftest import CHECKOUT, Farm, StartFarm

SMALL = CHECKOUT / "tests" / "farm" / "small.toml"
STEPS = 150
VICTIMS = ("sample_buffer", "llm_proxy", "llm_proxy.engine", "env_manager", "reward_gateway", "trainer", "valkey")
MORE_THAN_OUTSTANDING = 3
"""Steps that no work begun before a kill suffices for: at alpha 1 two batches are outstanding at most."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_farm_survives_kill_9_of_each_of_its_services(start_farm: StartFarm):
    farm = start_farm(SMALL)
    farm.wait_for_step(2, seconds=90)

    for victim in VICTIMS:
        step = farm.progress().step_count
        (pid,) = farm.valkey_pids() if victim == "valkey" else farm.pids(victim)
        os.kill(pid, signal.SIGKILL)
        farm.wait_for_step(step + MORE_THAN_OUTSTANDING, seconds=90)

    status, summary = farm.finish(seconds=150)
    assert status == 0
    assert summary["steps"] == STEPS
    assert summary["restarts"] == len(VICTIMS)
    assert summary["samples"] == STEPS * 4 * 4
    assert summary["max_staleness"] <= 1


def test_a_stopped_run_goes_on_at_the_right_step_version_and_task(start_farm: StartFarm):
    first = start_farm(SMALL)
    first.wait_for_step(3, seconds=90)
    first.stop()
    before = _steps(first)

    second = start_farm(SMALL, base_port=first.base_port)
    second.wait_until(lambda: second.progress().step_count >= 3, seconds=90)
    ledger = second.ledger()
    status, summary = second.finish(seconds=150)

    assert len(before) >= 3
    assert ledger.next_commit_step >= 3
    assert ledger.policy_version >= ledger.next_commit_step + 1
    assert ledger.next_group_index >= 3 * 4
    assert _steps(second) == list(range(STEPS))
    assert status == 0
    assert summary["resumed"] is True
    assert summary["samples"] == STEPS * 4 * 4


def test_a_killed_rollfarm_up_leaves_its_run_to_the_next_once_its_services_have_drained(start_farm: StartFarm):
    first = start_farm(SMALL)
    first.wait_for_step(2, seconds=90)
    services = psutil.Process(first.process.pid).children(recursive=True)
    (buffer,) = first.pids("sample_buffer")
    os.kill(buffer, signal.SIGSTOP)

    first.process.kill()
    refused = start_farm(SMALL)
    status, said = refused.process.wait(60), refused.last_words()
    os.kill(buffer, signal.SIGCONT)
    _, left = psutil.wait_procs(services, timeout=60)
    second_status, summary = start_farm(SMALL).finish(seconds=150)

    assert status == 1
    assert "was killed and its services still drain" in said
    assert not left
    assert (second_status, summary["resumed"], summary["samples"]) == (0, True, STEPS * 4 * 4)


def _steps(farm: Farm) -> list[int]:
    lines = [json.loads(line) for line in (farm.run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "step"]
