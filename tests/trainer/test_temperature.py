"""What the engine says of the tokens that it samples, and what the trainer says of them, with a real engine."""

from pathlib import Path

import numpy as np
import pytest

from tests.engine.kit import Answer, embedded_root, serve
from tests.trainer.conftest import make_backend
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.rows import Row

PROMPT = [8, 9, 10]


def row(answer: Answer) -> Row:
    return Row(
        np.array([*PROMPT, *answer.ids], np.int32),
        np.array([False] * len(PROMPT) + [True] * len(answer.ids)),
        behavior_logp_P=np.array(answer.logprobs, np.float32),
        advantage_P=np.ones(len(answer.ids), np.float32),
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
async def test_under_equal_weights_the_ratio_is_1_at_every_temperature(model_path: Path, temperature: float) -> None:
    objective = policy_objective(TrainerConfig())
    async with serve(embedded_root(model_path)) as host:
        rows = [row(each) for each in await host.client.generate([PROMPT] * 16, temperature=temperature)]

    measured = make_backend(model_path).train_step(
        rows, objective, temperature=temperature, norm=objective.norm(rows), lr=1e-2
    )

    assert measured["ratio"] == pytest.approx(1, abs=1e-4)
    assert measured["behavior_gap_max"] < 1e-4
    assert measured["tokens"] == 16 * 16
