"""A learner with a critic, a reference and a teacher, as one rank of some: MODEL OTHER_MODEL BACKEND KL.

Rank 0 learns from the same groups three times and says what it measured in one line of JSON.
"""

import json
import sys

from rollfarm.run import ModelConfig, RunConfig
from rollfarm.v1 import sample_buffer_pb2
from tests.trainer.conftest import group
from trainer import ranks
from trainer.backends.build import build_models
from trainer.config import TrainerConfig, TrainerRoot
from trainer.learner import build_learner, objectives


def learnt(path: str, other_path: str, backend: str, estimator: str) -> list[dict[str, float]]:
    """What rank 0 measured; nothing by another rank."""
    settings = {
        "device": "cpu",
        "backend": backend,
        "deepspeed": {"stage": 3},
        "lr": 1e-3,
        "advantage": "gae",
        "critic": {"lr": 1e-3},
        "kl": {"penalty": 0.1, "penalty_estimator": "k3", "loss": 0.1, "loss_estimator": estimator},
        "teacher": {"path": other_path, "coef": 0.1},
        "micro_batch_tokens": 16,
    }
    root = TrainerRoot(
        run=RunConfig(steps=10), model=ModelConfig(path=path), trainer=TrainerConfig.model_validate(settings)
    )
    if ranks.rank() > 0:
        ranks.follow(lambda: build_models(root.model, root.trainer), objectives(root.trainer))
        return []
    learner = build_learner(root)
    groups = [group("a", [1, 0, 1, 0]), group("b", [0, 1, 0])]
    measured = [
        learner.learn(sample_buffer_pb2.Batch(batch_id=str(step), step=step, policy_version=2), groups).metrics
        for step in range(3)
    ]
    learner.leader.stop()
    return measured


if __name__ == "__main__":
    print(json.dumps(learnt(*sys.argv[1:])))
