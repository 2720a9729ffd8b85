"""One rank: MODEL FOLDER STEPS [ROWS]. Rank 0 trains that many steps, saves and says what the last one measured."""

import json
import sys
from itertools import count
from pathlib import Path

import torch

from tests.trainer.conftest import make_backend, random_rows
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.ranks import Leader, follow, join, rank


def main(model: str, folder: str, steps: str, rows_each: str = "9") -> None:
    objectives = {"policy": policy_objective(TrainerConfig())}
    join(torch.device("cpu"), 60)
    if rank() > 0:
        follow(lambda: make_backend(Path(model)), objectives)
        return
    leader = Leader(make_backend(Path(model)), objectives)
    measured: dict[str, float] = {}
    for seed in count() if steps == "forever" else range(int(steps)):
        rows = random_rows(int(rows_each), seed=seed)
        norm = objectives["policy"].norm(rows)
        measured = leader.train_step(rows, "policy", temperature=0.8, norm=norm, lr=1e-2)
        leader.pulse()
        if steps == "forever" and seed == 0:
            print("begun", flush=True)
    leader.save(Path(folder))
    leader.stop()
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
