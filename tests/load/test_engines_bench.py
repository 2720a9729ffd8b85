"""The engine benchmark: its workload and its two ways of scheduling by hand, and the whole script on a few steps."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import pytest

from load_tests.engine_bench.scheduling import Groups, by_batches, by_queue
from load_tests.engine_bench.workload import CUT, Prompt, prompt

CHECKOUT = Path(__file__).parents[2]


class FakeSamples:
    """Time passes by the token on endless slots: whatever is shortest ends first."""

    def __init__(self) -> None:
        self.now = 0
        self.issued: list[tuple[int, list[int], bool]] = []
        """When, which prompts, and whether their samples are to be together."""
        self.cancelled: list[int] = []
        self._open: list[tuple[int, int]] = []

    async def ask(self, prompts: list[Prompt], *, together: bool) -> None:
        self.issued.append((self.now, [each.number for each in prompts], together))
        self._open += [(self.now + length, each.number) for each in prompts for length in each.lengths]

    async def ended(self) -> list[tuple[int, str]]:
        self._open.sort()
        self.now, number = self._open.pop(0)
        return [(number, f"engine-{number}")]

    async def cancel(self) -> None:
        self.cancelled = [number for _, number in self._open]


STREAM = (
    Prompt(0, (10, 50), (True, False)),
    Prompt(1, (10, 20), (True, True)),
    Prompt(2, (10, 15), (True, False)),
    Prompt(3, (10, 90), (False, False)),
    Prompt(4, (10, 12), (False, True)),
    Prompt(5, (100, 100), (False, True)),
)
"""Of two samples each; the prompts 1 and 3 teach nothing."""


async def test_batches_wait_for_their_longest_sample_and_go_on_until_there_are_enough_groups():
    samples = FakeSamples()

    step = await by_batches(samples, STREAM.__getitem__, groups=2, batch=2)

    assert samples.issued == [(0, [0, 1], True), (50, [2, 3], True)]
    assert samples.now == 140
    assert (step.prompts, step.rounds) == (4, 2)


async def test_a_queue_replaces_each_prompt_that_is_complete_and_cancels_the_rest():
    samples = FakeSamples()

    step = await by_queue(samples, STREAM.__getitem__, groups=2, running=2)

    assert samples.issued == [(0, [0, 1], False), (20, [2], False), (35, [3], False)]
    assert samples.now == 50
    assert samples.cancelled == [3]
    assert step.prompts == 4


async def test_redundant_prompts_run_beside_and_the_first_that_teach_are_kept():
    samples = FakeSamples()

    await by_queue(samples, STREAM.__getitem__, groups=2, running=5)

    assert samples.issued == [(0, [0, 1, 2, 3, 4], False), (12, [5], False)]
    assert samples.now == 15
    assert sorted(samples.cancelled) == [0, 1, 3, 5, 5]


def test_groups_whose_samples_were_made_by_two_engines_are_counted():
    groups = Groups()
    groups.begin(STREAM[0])
    groups.begin(STREAM[2])

    assert [groups.ended(0, "a"), groups.ended(2, "a"), groups.ended(2, "a"), groups.ended(0, "b")] == [
        False,
        False,
        True,
        True,
    ]
    assert groups.apart == 1
    assert [kept.number for kept in groups.kept] == [2, 0]


def test_a_prompt_is_a_function_of_its_place():
    assert prompt(1, 2, 3, samples=8, median=64) == prompt(1, 2, 3, samples=8, median=64)
    assert prompt(1, 2, 3, samples=8, median=64) != prompt(1, 2, 4, samples=8, median=64)


def test_lengths_have_the_median_and_the_tail_that_are_promised():
    drawn = [prompt(0, 0, number, samples=8, median=1000) for number in range(2000)]
    lengths: Sequence[int] = [length for each in drawn for length in each.lengths]

    assert median(lengths) == pytest.approx(1000, rel=0.05)
    assert fmean(lengths) == pytest.approx(1000 * 2.718**0.5, rel=0.05)
    assert max(lengths) == CUT * 1000
    assert fmean(not each.teaches for each in drawn) == pytest.approx(2 / 9, abs=0.03)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_script_prints_its_figures():
    command = [sys.executable, "load_tests/engines.py", "--skip", "vllm", "--steps", "1", "--rounds", "1"]

    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=170)

    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["two_engines_speedup"] > 1
    assert figures["batch_groups_apart"] == 0
    assert figures["queue_prompts"] >= 8
    assert {"queue_speedup", "redundant_speedup", "carried_speedup", "distribution", "time_scale"} <= figures.keys()
