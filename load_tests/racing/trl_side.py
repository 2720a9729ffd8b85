"""TRL's side: GRPOTrainer on the demo's model, environment, batch and optimiser, in an environment of its own.

Each step's episodes are played in lock-step, a turn of all of them at a time: by the method that TRL's own loop of
turns calls, or by one forward pass, which is less work.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import torch

from load_tests.racing.task import MAX_STEPS, RUN_SECONDS, NotReached, Raced, is_reached, lines
from load_tests.up import ROOT

VERSION = "1.16.0"
VENV = ROOT / ".tools" / "trl"
THREADS = 2
"""Of one torch operation: all cores, as the farm has them."""


Generation = Literal["trl", "one_pass"]
"""What makes the tokens of a turn: a name of trl_run.GENERATIONS."""


class NotInstalled(Exception):
    """It cannot be measured here."""


def install() -> str:
    """Make its environment, once for this checkout; its Python. Raises NotInstalled."""
    done = VENV / f"installed-{VERSION}"
    if not done.is_file():
        print(f"Installing TRL {VERSION} in {VENV} (1 GB, once) ...", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        pip = [str(VENV / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        _run([*pip, f"torch=={torch.__version__.partition('+')[0]}"])
        _run([*pip, "--constraint", str(ROOT / "constraints.txt"), "--editable", str(ROOT), f"trl=={VERSION}"])
        done.touch()
    return str(VENV / "bin" / "python")


def race(folder: Path, python: str, *, seed: int, generation: Generation) -> Raced:
    """One run. Raises NotReached."""
    name = f"trl-{generation}-{seed}"
    told = folder / f"{name}.jsonl"
    command = [python, "-m", "load_tests.racing.trl_run", str(folder / f"model-{seed}"), str(told), str(seed)]
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.log").open("w") as log:
        began = time.time()
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, str(MAX_STEPS), generation],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **quiet, "OMP_NUM_THREADS": str(THREADS)},
                timeout=RUN_SECONDS,
            )
    begin, *steps = lines(told) or [{"time": began}]
    if not is_reached([step["reward"] for step in steps]):
        raise NotReached(json.dumps({"side": "trl", "log": str(folder / f"{name}.log")}))
    return Raced(steps[-1]["time"] - begin["time"], begin["time"] - began, len(steps))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise NotInstalled(done.stdout[-2000:])
