from pathlib import Path

import pytest
import torch

from rollfarm.run import ModelConfig, RunConfig, SamplingConfig
from rollfarm.v1 import sample_buffer_pb2
from tests.trainer.conftest import group
from trainer.backends.scoring import load_model
from trainer.config import TrainerConfig, TrainerRoot
from trainer.learner import Learner, build_learner

BATCH = sample_buffer_pb2.Batch(batch_id="b", step=0, policy_version=2, group_count=2)


def make(model_path: Path, *, steps: int = 100, temperature: float = 1.0, **settings: object) -> Learner:
    run = RunConfig(steps=steps, sampling=SamplingConfig(temperature=temperature))
    trainer = TrainerConfig.model_validate({"lr": 1e-2, "device": "cpu", **settings})
    return build_learner(TrainerRoot(run=run, model=ModelConfig(path=str(model_path)), trainer=trainer))


def preference(learner: Learner, model_path: Path) -> float:
    """How much likelier word 7 is than word 6 after the prompt that the groups share."""
    model = load_model(str(model_path))
    model.load_state_dict(dict(learner.leader.named_tensors()))
    with torch.no_grad():
        logits = model(torch.tensor([[8, 9]])).logits[0, -1]
    return float(logits[7] - logits[6])


def test_what_was_paid_becomes_likelier_and_the_step_is_measured(model_path: Path) -> None:
    learner = make(model_path)
    before = preference(learner, model_path)

    outcome = learner.learn(BATCH, [group("a", [1, 0, 1, 0]), group("b", [0, 1, 0, 1])])

    assert preference(learner, model_path) > before
    assert outcome.mean_reward == 0.5
    assert outcome.metrics["episode_success"] == 0.5
    assert (outcome.metrics["staleness"], outcome.metrics["staleness_max"]) == (1, 1)
    assert outcome.metrics["tokens"] == 24


def test_segments_of_a_trajectory_are_trained_in_one_step_and_measured_together(model_path: Path) -> None:
    learner, groups = make(model_path), [group("a", [1, 0]), group("b", [0, 1])]
    for each in groups[0].trajectories:
        again = list(each.turns)
        each.turns.extend(again)
        each.turns[len(again)].begins_segment = True

    metrics = learner.learn(BATCH, groups).metrics

    assert (metrics["tokens"], metrics["episode_segments"], metrics["episode_tokens"]) == (18, 1.5, 9)
    assert metrics["zero_advantage_share"] == 0


def test_the_policy_is_taken_at_the_temperature_of_the_samples(model_path: Path) -> None:
    def entropy(temperature: float) -> float:
        learner = make(model_path, temperature=temperature)
        return learner.learn(BATCH, [group("a", [1, 0]), group("b", [0, 1])]).metrics["entropy"]

    assert entropy(0.01) < entropy(1.0) < entropy(100.0)


def test_groups_that_agree_teach_nothing(model_path: Path) -> None:
    learner = make(model_path)
    before = learner.snapshot(1)

    outcome = learner.learn(BATCH, [group("a", [1, 1]), group("b", [0, 0])])

    assert outcome.metrics["zero_advantage_share"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before.buffers, learner.snapshot(2).buffers, strict=True))


def test_the_shuffled_control_deals_the_same_scores_to_others(model_path: Path) -> None:
    learner, control = make(model_path), make(model_path, shuffle_scores=True)
    groups = [group("a", [1, 0, 0, 0]), group("b", [0, 0, 3, 0])]

    dealt, shuffled = learner._samples(groups, 0).reward_N.tolist(), control._samples(groups, 0).reward_N.tolist()

    assert sorted(dealt) == sorted(shuffled)
    assert dealt != shuffled
    assert shuffled == control._samples(groups, 0).reward_N.tolist()


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [0.5, 1, 1]), ("linear", [0.5, 0.5, 0.1]), ("cosine", [0.5, 0.5, 0.0245])]
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(
    model_path: Path, schedule: str, expected: list[float]
) -> None:
    learner = make(model_path, steps=10, lr=1.0, lr_schedule=schedule, lr_warmup_steps=2)

    assert [learner.lr_share(step) for step in (0, 5, 9)] == pytest.approx(expected, abs=1e-3)
