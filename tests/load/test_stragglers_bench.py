"""The benchmark of stragglers: its arithmetic by hand, lock-step, and the whole script on a few episodes."""

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

from load_tests.straggling import report
from load_tests.straggling.farm import Played
from load_tests.straggling.plan import Case, Way
from load_tests.straggling.world import LATENCIES, Rounds

ROOT = Path(__file__).parents[2]


def played(seconds: float, *, trained: int = 8, begun: int = 10, wedged: bool = False) -> Played:
    return Played(seconds, trained, begun, failed=0, cancel_seconds=0.1, cpu_seconds=1.0, wedged=wedged)


@pytest.mark.parametrize(("latency", "mean", "spread"), [("normal_10_5", 10.0, 4.9), ("lognormal", 10.0, 20.0)])
def test_latencies_have_the_moments_of_their_names(latency: str, mean: float, spread: float):
    chance = random.Random(1)
    drawn = [LATENCIES[latency](chance) for _ in range(200_000)]

    average = sum(drawn) / len(drawn)
    deviation = (sum((each - average) ** 2 for each in drawn) / len(drawn)) ** 0.5
    assert average == pytest.approx(mean, rel=0.02)
    assert deviation == pytest.approx(spread, rel=0.1)


def test_without_overhead_512_environments_gain_what_was_published():
    case = Case("normal_10_10", groups=64, scale=1.0, cut_seconds=1e9)
    batch, env = (Way(case, in_lockstep=lockstep, is_redundant=False).ideal_seconds() for lockstep in (True, False))

    assert batch == pytest.approx(892, rel=0.02)
    assert env == pytest.approx(362, rel=0.05)


def test_redundant_episodes_are_begun_beside_those_that_are_needed():
    way = Way(Case("hangs", groups=16, scale=1.0, cut_seconds=9.0), in_lockstep=False, is_redundant=True)

    assert (way.redundant_groups, way.redundant_members, way.begun) == (2, 1, 162)
    assert played(1.0, trained=128, begun=160).dropped_share == pytest.approx(0.2)


def test_a_way_that_is_wedged_has_no_speed_up():
    assert report.ratio(played(9.0), played(3.0)) == 3.0
    assert report.ratio(played(9.0), played(3.0, wedged=True)) is None


async def test_a_turn_in_lockstep_is_answered_when_enough_have_come_and_who_comes_later_is_not_kept():
    rounds = Rounds(2)
    first = asyncio.create_task(rounds.arrive(0))
    await asyncio.sleep(0)
    assert not first.done()

    await rounds.arrive(0)

    await first
    await asyncio.wait_for(rounds.arrive(0), 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_script_ends_with_one_line_of_figures():
    script = await asyncio.create_subprocess_exec(
        sys.executable, "load_tests/stragglers.py", "--quick", cwd=ROOT, stdout=-1, stderr=-1
    )

    stdout, stderr = await script.communicate()

    assert script.returncode == 0, stderr.decode()
    figures = json.loads(stdout.splitlines()[-1])
    assert figures["wedged"] == 0
    assert figures["env_level_speedup"] > 1.0
    assert figures["redundant_speedup"] > 0
    assert 0 < figures["dropped_share"] < 0.4
    assert set(figures["cases"]) == {"normal_10_10", "hangs"}
