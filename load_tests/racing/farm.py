"""The farm's side: `rollfarm up` with the demo, until its batches reach the target."""

import json
import signal
import subprocess
import time
from pathlib import Path

from load_tests.racing.task import MAX_STEPS, RUN_SECONDS, NotReached, Raced, is_reached, lines
from load_tests.up import DEMO, ROOT, command, environment

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
        "trainer.lr_schedule": "constant",
        "trainer.validation_episodes": "0",
        "trainer.checkpoint_every": str(MAX_STEPS),
    }
    with (folder / f"{name}.log").open("w") as log:
        began = time.time()
        process = subprocess.Popen(
            command(DEMO, flags), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
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
