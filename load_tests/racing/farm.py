"""The farm's side: `rollfarm up` with the demo, until its batches reach the target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from load_tests.racing.task import DEMO, MAX_STEPS, ROOT, RUN_SECONDS, NotReached, Raced, is_reached, lines
from rollfarm.ports import free_ports

DRAIN_SECONDS = 60.0
LOOK_SECONDS = 0.1


def race(folder: Path, *, seed: int, alpha: float) -> Raced:
    """One run. Raises NotReached."""
    name = f"farm-{alpha:g}-{seed}"
    flags = {
        "run.folder": str(folder),
        "run.name": name,
        "run.seed": str(seed),
        "run.alpha": str(alpha),
        "run.steps": str(MAX_STEPS),
        "model.path": str(folder / f"model-{seed}"),
        "model.create.seed": str(seed),
        "trainer.validation_episodes": "0",
        "trainer.checkpoint_every": str(MAX_STEPS),
        "up.base_port": str(free_ports(100)),
        "up.console": "off",
        "up.min_gain": "0",
    }
    argv = [sys.executable, "-m", "rollfarm", "up", str(DEMO)]
    argv += [word for key, value in flags.items() for word in (f"--{key}", value)]
    with (folder / f"{name}.log").open("w") as log:
        began = time.time()
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            return _watch(process, folder / name / "metrics.jsonl", began)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(DRAIN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(process: "subprocess.Popen[bytes]", metrics: Path, began: float) -> Raced:
    while time.time() < began + RUN_SECONDS:
        steps = [line for line in lines(metrics) if line["kind"] == "step"]
        rewards = [step["mean_reward"] for step in steps]
        reached = next((count for count in range(1, len(rewards) + 1) if is_reached(rewards[:count])), None)
        if reached is not None:
            first = steps[0]
            spent = sum(first[f"{part}_seconds"] for part in ("wait", "train", "publish"))
            first_generation = first["time"] - spent
            return Raced(steps[reached - 1]["time"] - first_generation, first_generation - began, reached)
        if process.poll() is not None:
            break
        time.sleep(LOOK_SECONDS)
    raise NotReached(json.dumps({"side": "farm", "metrics": str(metrics)}))
