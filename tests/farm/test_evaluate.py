"""`rollfarm evaluate` as a person runs it, on the embedded engine: its service killed, run again, shown once more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollfarm.ports import free_ports
from tests.farm.conftest import CHECKOUT, PORTS

CONFIG = """
[run]
name = "two"
sampling = { max_tokens = 1 }

[[run.domains]]
name = "sums"
environment = "arithmetic"
weight = 5
settings = { operations = ["minus"] }

[[run.domains]]
name = "lake"
environment = "frozen_lake"
settings = { size = 3, view = "compact" }

[model.create]
words = "what is minus at left down right up ice hole goal wall / 0 1 2 3 4 5 6 7 8 9"
hidden_size = 32
layers = 1

[reward_gateway.domains.sums]
rewards = [{ name = "exact" }]

[reward_gateway.domains.lake]
rewards = [{ name = "environment" }]

[trainer.evaluation]
tasks = 60
samples = 4
k = [1, 4]
metric = "success"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_held_out_task_counts_once_though_the_service_is_killed(tmp_path: Path):
    (tmp_path / "farm.toml").write_text(CONFIG)
    folder = tmp_path / "two-evaluation"

    first = _start(tmp_path)
    _until_a_task_is_done(folder, first)
    for process in psutil.Process(first.pid).children(recursive=True):
        if "trainer.evaluation" in process.cmdline():
            process.send_signal(signal.SIGKILL)
    out, _ = first.communicate(timeout=300)

    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    found = json.loads(out.splitlines()[-1])
    assert first.returncode == 0
    assert sorted((task["domain"], task["task"]) for task in tasks) == [
        (domain, number) for domain in ("lake", "sums") for number in range(60)
    ]
    assert {len(task["values"]) for task in tasks} == {4}
    assert found == json.loads((folder / "evaluation.json").read_text())
    _assert_adds_up(found["domains"]["sums"], [task for task in tasks if task["domain"] == "sums"])
    assert any("pass@4" in line for line in out.splitlines()[:-1])

    again, _ = _start(tmp_path).communicate(timeout=300)

    assert json.loads(again.splitlines()[-1]) == found


def _assert_adds_up(found: dict[str, Any], tasks: list[dict[str, Any]]) -> None:
    passed = [sum(value >= 1 for value in task["values"]) for task in tasks]
    assert found["tasks"] == 60
    assert found["pass@1"]["value"] == pytest.approx(sum(passed) / 240)
    assert found["pass@4"]["value"] == pytest.approx(sum(count > 0 for count in passed) / 60)
    assert 0 <= found["avg@4"]["low"] <= found["avg@4"]["value"] <= found["avg@4"]["high"]


def _start(folder: Path) -> subprocess.Popen[str]:
    flags = {"--run.folder": folder, "--model.path": folder / "model", "--up.base_port": free_ports(PORTS)}
    argv = [sys.executable, "-m", "rollfarm", "evaluate", str(folder / "farm.toml")]
    argv += [str(word) for flag in flags.items() for word in flag]
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("a"),
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _until_a_task_is_done(folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 200
    while not (folder / "tasks.jsonl").is_file() or not (folder / "tasks.jsonl").read_text():
        assert process.poll() is None, (folder.parent / "stderr").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
