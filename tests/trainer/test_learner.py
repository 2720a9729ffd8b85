from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig, RunConfig, SamplingConfig
from rollfarm.tokens import pack_ids, pack_logprobs
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


# --- what cannot be learnt from ---


def weights(learner: Learner) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in learner.leader.named_tensors()]


def stand_still(before: list[torch.Tensor], learner: Learner) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, weights(learner), strict=True))


def poisoned(name: str, logprob: float) -> sample_buffer_pb2.Group:
    made = group(name, [1, 0])
    made.trajectories[0].turns[1].logprobs = pack_logprobs([logprob])
    return made


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_group_with_a_log_probability_that_is_no_number_is_left_out_and_named(
    model_path: Path, logprob: float
) -> None:
    learner, without = make(model_path), make(model_path)
    sound = group("sound", [1, 0])

    with capture_logs() as logs:
        metrics = learner.learn(BATCH, [poisoned("poisoned", logprob), sound]).metrics
    expected = without.learn(BATCH, [sound]).metrics

    assert [entry["causes"] for entry in logs] == [{"poisoned": "a log-probability of trajectory t is not finite"}]
    assert (metrics.pop("refused_groups"), expected.pop("refused_groups")) == (1, 0)
    assert metrics == expected
    assert stand_still(weights(without), learner)


def empty(name: str) -> sample_buffer_pb2.Group:
    return sample_buffer_pb2.Group(group_id=name)


def silent(name: str) -> sample_buffer_pb2.Group:
    """A group in which the policy wrote nothing."""
    made = group(name, [1, 0])
    for each in made.trajectories:
        del each.turns[1:]
    return made


@pytest.mark.parametrize("bad", [empty("bad"), silent("bad"), poisoned("bad", float("nan"))])
def test_a_batch_without_anything_to_learn_from_is_skipped_and_named_and_the_next_one_is_not(
    model_path: Path, bad: sample_buffer_pb2.Group
) -> None:
    learner = make(model_path)
    before = weights(learner)

    with capture_logs() as logs:
        skipped = learner.learn(BATCH, [bad]).metrics

    assert (skipped["skipped"], skipped["tokens"]) == (1, 0)
    assert [entry["group_ids"] for entry in logs if "group_ids" in entry] == [["bad"]]
    assert stand_still(before, learner)
    assert learner.learn(BATCH, [group("a", [1, 0])]).metrics["skipped"] == 0
    assert not stand_still(before, learner)


def test_an_empty_group_among_others_changes_nothing(model_path: Path) -> None:
    learner, without = make(model_path), make(model_path)

    metrics = learner.learn(BATCH, [empty("e"), group("a", [1, 0])]).metrics

    assert metrics | {"refused_groups": 0.0} == without.learn(BATCH, [group("a", [1, 0])]).metrics


def test_a_batch_that_shaping_drops_is_skipped(model_path: Path) -> None:
    learner = make(model_path, shaping={"difficulty_high": 1.0})

    with capture_logs() as logs:
        metrics = learner.learn(BATCH, [group("a", [1, 1])]).metrics

    assert (metrics["skipped"], metrics["dropped_rows_share"]) == (1, 1)
    assert logs[-1]["event"] == "step skipped: trainer.shaping drops all of it"


def test_after_others_a_batch_that_agrees_does_not_move_the_weights_by_momentum(model_path: Path) -> None:
    learner = make(model_path)
    learner.learn(BATCH, [group("a", [1, 0])])
    before = weights(learner)

    metrics = learner.learn(BATCH, [group("a", [1, 1])]).metrics

    assert (metrics["zero_advantage_share"], metrics["lr"], metrics["grad_norm"]) == (1, 0, 0)
    assert stand_still(before, learner)


def test_a_step_that_is_not_finite_names_its_groups_and_the_next_one_learns(model_path: Path) -> None:
    learner = make(model_path, advantage="dr_grpo")
    before = weights(learner)

    with capture_logs() as logs:
        metrics = learner.learn(BATCH, [group("huge", [1e300, 0]), group("b", [1, 0])]).metrics

    assert metrics["skipped"] == 1
    assert [entry["group_ids"] for entry in logs if "group_ids" in entry] == [["huge", "b"]]
    assert stand_still(before, learner)
    assert learner.learn(BATCH, [group("b", [1, 0])]).metrics["skipped"] == 0


@pytest.mark.parametrize("token", [18, -1])
def test_a_token_of_another_vocabulary_is_an_error_that_names_both_sizes(model_path: Path, token: int) -> None:
    learner, groups = make(model_path), [group("a", [1, 0])]
    groups[0].trajectories[1].turns[2].token_ids = pack_ids([3, token])
    before = weights(learner)

    with pytest.raises(ConfigError, match=rf"group a has token {token}.* at least {max(9, token) + 1} .* trainer's 18"):
        learner.learn(BATCH, groups)

    assert stand_still(before, learner)


def test_several_steps_for_a_batch_are_anchored_where_the_first_began(model_path: Path) -> None:
    settings = {"loss_settings": {"anchor": "proximal"}, "correction": "truncated"}
    learner = make(model_path, steps_per_batch=2, passes=2, **settings)

    metrics = learner.learn(BATCH, [group("a", [1, 0, 1, 0]), group("b", [0, 1, 0, 1])]).metrics

    assert metrics["tokens"] == 2 * 24
    assert metrics["correction"] > 0
    assert metrics["clipped"] > 0


def test_how_far_off_policy_a_step_is_is_told_by_lag_and_by_quantiles(model_path: Path) -> None:
    learner = make(model_path)
    fresh, stale = group("fresh", [1, 0]), group("stale", [1, 0])
    for each in fresh.trajectories:
        for turn in each.turns:
            for span in turn.version_spans:
                span.policy_version = 2

    metrics = learner.learn(BATCH, [fresh, stale]).metrics

    assert metrics["kl_behavior_lag_0"] == pytest.approx(metrics["kl_behavior_lag_1"])
    assert "kl_behavior_lag_2" not in metrics
    assert metrics["ratio_p01"] <= metrics["ratio_p50"] <= metrics["ratio_p99"] <= metrics["ratio_max"] * 1.1
    assert 0 < metrics["effective_sample_share"] <= 1
    assert not [name for name in metrics if name.startswith(("log_ratio_bin", "kl_lag", "tokens_lag"))]
