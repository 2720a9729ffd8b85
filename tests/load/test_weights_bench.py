"""The benchmark of weights runs, and its figures are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_prints_its_figures():
    command = [sys.executable, "load_tests/weights.py", "--sizes", "3M", "--rounds", "1", "--skip", "vllm"]

    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=290)

    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["full_vs_raw"]["3M"].keys() == figures["pause_s"]["3M"].keys() == {"gloo", "ipc", "store"}
    assert figures["delta_bytes_share"]["3M"] < 0.02
    assert figures["adapter_bytes_share"]["3M"] < 0.02
    assert figures["delays_nobody"]
