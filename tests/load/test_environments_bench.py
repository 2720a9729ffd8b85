"""The benchmark of environments: its arithmetic by hand, and the whole script for a moment."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from load_tests.stepping import report
from load_tests.stepping.flow import Flow, measure
from load_tests.stepping.holding import Held

ROOT = Path(__file__).parents[2]

OURS = ("in_process", "grpc", "attached", "process")


def flow(per_second: int, *, client_us: float = 10.0, server_us: float = 0.0) -> Flow:
    return Flow(2 * per_second, 2.0, 2 * per_second * client_us / 1e6, 2 * per_second * server_us / 1e6)


def held(mb: float, server_mb: float = 0.0) -> Held:
    return Held(1000, mb, 100.0, server_mb, ramp_seconds=2.0, gap_ms=5.4, ramp_gap_ms=30.0, handed_in=1000)


def test_ratios_are_within_a_round_and_medians_over_the_rounds():
    measured = {
        "grpc": {"together": [flow(300, client_us=20, server_us=20), flow(900), flow(200)]},
        "openenv": {"together": [flow(100, client_us=40, server_us=60), flow(100), flow(100)]},
    }

    made = report.figures(measured)

    assert made["grpc_vs_openenv"] == 3.0  # of 3, 9 and 2
    assert made["grpc_vs_openenv_cpu"] == 1.0  # of 2.5, 1 and 1
    assert made["grpc_vs_openenv_default"] is None
    assert made["steps_per_s"] == dict.fromkeys(report.TRANSPORTS) | {"grpc": 300, "openenv": 100}


def test_cpu_is_that_of_both_ends():
    made = report.figures({"grpc": {"together": [flow(100, client_us=20, server_us=30)]}})

    assert made["cpu_us_per_step"] == dict.fromkeys(report.TRANSPORTS) | {"grpc": 50.0}
    assert made["cpu_us_server"] == dict.fromkeys(report.TRANSPORTS) | {"grpc": 30.0}


def test_the_memory_of_an_episode_is_what_env_manager_grew_by():
    made = report.held_figures(held(mb=120.0), held(mb=110.0, server_mb=80.0))

    assert (made["held_10000_mb"], made["held_kb_per_episode"]) == (120, 20.0)
    assert (made["held_on_server_kb_per_episode"], made["held_server_10000_mb"]) == (10.0, 80)


async def test_every_session_has_a_step_under_way_at_all_times():
    under_way, most = 0, 0

    async def step() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1

    played = await measure([step] * 4, seconds=0.05, server=0)

    assert most == 4
    assert played.steps >= 8
    assert played.server_seconds == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_script_ends_with_one_line_of_figures():
    script = await asyncio.create_subprocess_exec(
        *(sys.executable, "load_tests/environments.py", "--rounds", "1", "--quick", "--skip", "openenv"),
        cwd=ROOT,
        stdout=-1,
        stderr=-1,
    )

    stdout, stderr = await script.communicate()

    assert script.returncode == 0, stderr.decode()
    figures = json.loads(stdout.splitlines()[-1])
    assert all(figures["steps_per_s"][transport] > 0 for transport in OURS)
    assert all(figures["cpu_us_per_step_alone"][transport] >= 0 for transport in OURS)
    assert figures["grpc_vs_openenv"] is None
    assert figures["held_handed_in"] == figures["held_on_server_handed_in"] == figures["held_episodes"] == 96
    assert 50 < figures["held_10000_mb"] < 2000
