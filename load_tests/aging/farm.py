"""A farm that learns a small frozen lake while its samples may be as old as alpha allows."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from load_tests.up import DEMO, ROOT, SMALL_MODEL, command, environment

LAST = 0.2
"""Share of a run's steps that its end is the mean of."""

FINISH_SECONDS = 600.0

CORRECTED = {"anchor": "behavior"}
"""Ratios are to the policy that sampled, and bounded: the default."""

UNCORRECTED = {"anchor": "proximal"}
"""Ratios are to the policy as the step began: with one optimiser step for a batch they are 1, however old it is."""


class FarmFailed(Exception):
    """It did not come to its last step."""


@dataclass(frozen=True)
class Aged:
    """One run."""

    rewards: list[float]
    """Mean reward of each step."""

    staleness: float
    """Mean lag of the trained trajectories, in policy versions."""

    seconds: float

    @property
    def end(self) -> float:
        """The mean of the last steps' rewards."""
        return fmean(self.rewards[-max(1, round(LAST * len(self.rewards))) :])


def age(folder: Path, *, seed: int, alpha: float, corrected: bool, steps: int) -> Aged:
    """One run. Raises FarmFailed."""
    name = f"{'with' if corrected else 'without'}-{alpha:g}-{seed}"
    flags = SMALL_MODEL | {
        "run.folder": str(folder),
        "run.name": name,
        "run.seed": str(seed),
        "run.alpha": str(alpha),
        "run.steps": str(steps),
        "run.domains": json.dumps(
            [{"name": "lake", "environment": "frozen_lake", "settings": {"size": 3, "view": "compact"}}]
        ),
        "run.group_size": "16",
        "model.path": str(folder / f"model-{seed}"),
        "model.create.seed": str(seed),
        "trainer.loss_settings": json.dumps(CORRECTED if corrected else UNCORRECTED),
        "trainer.validation_episodes": "0",
    }
    log_file = folder / f"{name}.log"
    with log_file.open("w") as log:
        try:
            status = subprocess.run(
                command(DEMO, flags),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                timeout=FINISH_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            raise FarmFailed(f"{name} took longer than {FINISH_SECONDS:g} s; see {log_file}.") from None
    if status:
        raise FarmFailed(f"{name} ended with status {status}; see {log_file}.")
    return _read(folder / name)


def _read(run: Path) -> Aged:
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lags = [line["metrics"]["staleness"] for line in lines if line["kind"] == "step"]
    return Aged(rewards=summary["rewards"], staleness=fmean(lags), seconds=summary["wall_s"])
