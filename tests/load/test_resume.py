"""load_tests/resume.py: what it records and compares, and a small run of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from load_tests.killing.audit import KINDS
from load_tests.resuming.straight import Recording, differences
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp

CHECKOUT = Path(__file__).parents[2]


def part(step: int, *groups: tuple[str, list[str]]) -> pb.LeaseBatchResponse:
    return pb.LeaseBatchResponse(
        batch=pb.Batch(step=step),
        groups=[
            pb.Group(group_id=name, trajectories=[tp.Trajectory(trajectory_id=each) for each in members])
            for name, members in groups
        ],
    )


def test_a_batch_is_recorded_once_with_groups_that_were_sent_in_parts_put_together() -> None:
    recording = Recording()

    recording.keep([part(0, ("a", ["1", "2"]), ("b", ["3"])), part(0, ("b", ["4"]))])
    recording.keep([part(0, ("a", ["9"]))])

    found = [(group.group_id, [each.trajectory_id for each in group.trajectories]) for group in recording.batches[0]]
    assert found == [("a", ["1", "2"]), ("b", ["3", "4"])]


def test_the_greatest_difference_of_any_weight_is_found(tmp_path: Path) -> None:
    ones = {"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}
    others = {"a": np.array([0, -0.5, 0], np.float32), "b": np.array([1, 1.25], np.float32)}
    save_file(ones, tmp_path / "ones")
    save_file(others, tmp_path / "others")
    save_file({"a": ones["a"]}, tmp_path / "less")

    assert differences(tmp_path / "ones", tmp_path / "others") == 0.5
    assert differences(tmp_path / "ones", tmp_path / "less") == float("inf")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_that_was_killed_three_times_learnt_what_one_learns_that_was_not(tmp_path: Path) -> None:
    command = [sys.executable, "load_tests/resume.py", "--kills", "3", "--seed", "5", "--folder", str(tmp_path)]

    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=590, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == 3
    assert result["max_weight_difference"] <= 1e-6 < 1e-3 <= result["weight_change"]
    counted = ("lost", "trained_twice", "stale", "credits_leaked", "crashes")
    assert len(counted) == len(KINDS) + 1
    assert [result[name] for name in counted] == [0] * 5
    assert 0 < result["recovery_p50_s"] <= result["recovery_max_s"]
