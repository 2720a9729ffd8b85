"""How soon the demo has learnt: the farm against TRL's GRPOTrainer, and asynchronous against synchronous in the farm.

    .venv/bin/python load_tests/learning.py
    .venv/bin/python load_tests/learning.py --seeds 1 --skip trl

Measured is the wall time from the first generation until the mean reward of 8 steps in a row is 0.6, with the same
model, task, batch and optimiser on the same cores. The sides take turns, seed by seed, so that all meet the same
machine. TRL plays its episodes in lock-step inside GRPOTrainer (its `rollout_func`), in an environment of its own that
the first run installs: by the generation that its own loop of turns calls, and by a forward pass written for this task.

The last line on stdout is one JSON object; progress goes to stderr. The exit status is 1 when a run never gets there.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.racing import farm, trl_side
from load_tests.racing.task import NotReached, Raced, demo
from rollfarm.run import ModelConfig
from trainer.create_model import ensure_model

ALPHAS = (0.0, 1.0, 2.0)
DEMO_ALPHA = float(demo()["run"]["alpha"])
"""What TRL is compared with."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    python = None if "trl" in options.skip else trl_side.install()
    runs: dict[str, list[Raced]] = {}
    with tempfile.TemporaryDirectory(prefix="rf-learning-") as made:
        for seed in range(options.seeds):
            for name, race in _races(Path(made), python, seed).items():
                try:
                    raced = race()
                except NotReached as error:
                    _say(f"FAILED. Seed {seed} of {name} never reached the target: {error}")
                    return 1
                runs.setdefault(name, []).append(raced)
                _say(
                    f"seed {seed} {name:12}: {raced.seconds:6.1f} s, {raced.steps} steps, "
                    f"after a start of {raced.start_seconds:.1f} s"
                )
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
    print(json.dumps({"benchmark": "learning", **machine, "seeds": options.seeds, **figures(runs)}))
    return 0


def _races(folder: Path, python: str | None, seed: int) -> dict[str, Callable[[], Raced]]:
    """One of each kind, all from the same weights."""
    _make_model(folder / f"model-{seed}", seed)
    races: dict[str, Callable[[], Raced]] = {
        f"alpha_{alpha:g}": partial(farm.race, folder, seed=seed, alpha=alpha) for alpha in ALPHAS
    }
    if python is not None:
        races["trl"] = partial(trl_side.race, folder, python, seed=seed, generation="trl")
        races["trl_one_pass"] = partial(trl_side.race, folder, python, seed=seed, generation="one_pass")
    return races


def figures(runs: dict[str, list[Raced]]) -> dict[str, object]:
    """Medians, every run, and the ratios of medians."""
    middle = {name: median(raced.seconds for raced in raced_runs) for name, raced_runs in runs.items()}
    farm_s, synchronous_s = middle[f"alpha_{DEMO_ALPHA:g}"], middle["alpha_0"]
    return {
        "speedup_vs_trl": round(middle["trl"] / farm_s, 2) if "trl" in middle else None,
        "speedup_vs_one_pass": round(middle["trl_one_pass"] / farm_s, 2) if "trl_one_pass" in middle else None,
        "async_speedup": round(synchronous_s / farm_s, 2),
        "seconds": {name: round(value, 1) for name, value in middle.items()},
        "runs_s": {name: [round(raced.seconds, 1) for raced in each] for name, each in runs.items()},
        "steps": {name: [raced.steps for raced in each] for name, each in runs.items()},
        "start_s": {name: [round(raced.start_seconds, 1) for raced in each] for name, each in runs.items()},
    }


def _make_model(path: Path, seed: int) -> None:
    model = demo()["model"]
    ensure_model(ModelConfig.model_validate({**model, "path": str(path), "create": {**model["create"], "seed": seed}}))


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/learning.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--skip", action="append", choices=["trl"], default=[], help="what is left out")
    return parser


def _say(text: str) -> None:
    print(f"learning.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
