"""The demo's farm, as `rollfarm up` starts it, with the lake and the reward of this load test."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from load_tests.failing import injections
from load_tests.failing.account import Account, account, read_log
from load_tests.failing.judge import SECONDS
from load_tests.failing.world import ENVIRONMENT_SECONDS
from load_tests.up import DEMO, ROOT, SMALL_MODEL, command, environment

STEPS = 220
"""Of a run, until success no longer rises."""

SANDBOXES = 16
"""One that is stopped stays occupied until the reward's time is up."""

FINISH_SECONDS = 900.0


class FarmFailed(Exception):
    """It did not come to its last step."""


@dataclass(frozen=True)
class Played:
    """One run that came to its end."""

    seed: int
    rewards: list[float]
    """Mean reward of each step."""

    success: float
    """Of the last validation."""

    dropped_groups: dict[str, int]
    """By reason."""

    wall_seconds: float
    account: Account


def play(folder: Path, *, seed: int, failing: bool, steps: int, validation_episodes: int) -> Played:
    """One run of the demo from its beginning to its end, in `folder`. Raises FarmFailed."""
    name = f"{'with' if failing else 'without'}-{seed}"
    ledger = folder / f"{name}.jsonl"
    flags = _flags(seed, ledger if failing else None) | {
        "run.folder": str(folder),
        "run.name": name,
        "run.steps": str(steps),
        "model.path": str(folder / f"{name}-model"),
        "trainer.validation_episodes": str(validation_episodes),
    }
    with (folder / f"{name}.log").open("w") as log:
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
            raise FarmFailed(f"{name} took longer than {FINISH_SECONDS:g} s.") from None
    if status:
        raise FarmFailed(f"{name} ended with status {status}; see {folder / name}.log.")
    return _read(folder / name, ledger, seed)


def _flags(seed: int, ledger: Path | None) -> dict[str, str]:
    """What is not as in the demo."""
    settings = {"ledger": str(ledger), "seed": seed} if ledger else {}
    reward = {"name": "load_tests.failing.judge:program", "weight": 0, "timeout_seconds": SECONDS, "settings": settings}
    return SMALL_MODEL | {
        "run.seed": str(seed),
        "run.domains": json.dumps(
            [{"name": "lake", "environment": "load_tests.failing.world:FlakyLake", "settings": settings}]
        ),
        "model.create.seed": str(seed),
        "reward_gateway.domains": json.dumps({"lake": {"rewards": [{"name": "environment"}, reward]}}),
        "reward_gateway.sandbox.workers": str(SANDBOXES),
        "env_manager.environment_seconds": str(ENVIRONMENT_SECONDS),
        "env_manager.telemetry.log_format": "json",
        "env_manager.telemetry.log_level": "debug",
    }


def _read(run: Path, ledger: Path, seed: int) -> Played:
    summary = json.loads((run / "summary.json").read_text())
    with (run / "logs" / "env_manager-0.log").open() as log:
        told = read_log(log)
    validations = summary["validations"]
    return Played(
        seed=seed,
        rewards=summary["rewards"],
        success=validations[-1]["success"] if validations else 0.0,
        dropped_groups=summary["dropped_groups"],
        wall_seconds=summary["wall_s"],
        account=account(list(injections.read(ledger)), told, summary["outcomes"]),
    )
