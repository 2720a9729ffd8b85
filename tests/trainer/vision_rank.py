"""One rank, as a process: MODEL FOLDER CONFIG. It trains on rows of which only some have images, exports into FOLDER,
and rank 0 says what each step measured and the log-probabilities afterwards.

With two ranks a micro-batch has images on one, and none on the other.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollfarm.run import ModelConfig
from tests.trainer.test_vision import rows_for
from trainer import ranks
from trainer.backends.build import build_models
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.ranks import Leader
from trainer.rows import Row

STEPS = 3


def rows_at(model: Path) -> list[Row]:
    """Rows with images, and one without."""
    return [
        replace(row, behavior_logp_P=np.full(5, -3, np.float32), advantage_P=np.full(5, advantage, np.float32))
        for row, advantage in zip(rows_for(model)[:3], (1.0, -1.0, 0.5), strict=True)
    ]


def main(model: str, folder: str, config_json: str) -> None:
    config = TrainerConfig.model_validate_json(config_json)
    objectives = {"policy": (objective := policy_objective(config))}

    def build() -> ranks.Models:
        return build_models(ModelConfig(path=model), config)

    if ranks.rank() > 0:
        ranks.follow(build, objectives)
        return
    leader, rows = Leader(build(), objectives), rows_at(Path(model))
    norm = objective.norm(rows)
    measured = [leader.train_step(rows, "policy", temperature=1.0, norm=norm, lr=config.lr) for _ in range(STEPS)]
    scores_P = leader.score(rows, temperature=1.0)
    Path(folder).mkdir(exist_ok=True)
    leader.export(Path(folder))
    leader.stop()
    print(json.dumps({"steps": measured, "logprobs": scores_P.tolist()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
