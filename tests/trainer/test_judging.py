"""What tokens are worth, with real models asked: a critic, a reference and a teacher."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollfarm.config import ConfigError
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig, RunConfig, TinyModelConfig
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from tests.trainer.conftest import ROOT, WORDS, group
from tests.trainer.judging_rank import learnt
from trainer.backends.frozen import FrozenScorer
from trainer.config import TrainerConfig, TrainerRoot
from trainer.create_model import ensure_model
from trainer.judging import Judge, Judged
from trainer.learner import Learner, build_learner
from trainer.objective import advantage_of
from trainer.ranks import Role
from trainer.rows import Row, rows_of
from trainer.samples import samples_of, was_truncated
from trainer.vocabulary import check_vocabularies

SECONDS = 200.0
BATCH = sample_buffer_pb2.Batch(batch_id="b", step=0, policy_version=2, group_count=2)
GROUPS = [group("a", [1, 0, 1, 0]), group("b", [0, 1, 0, 0])]


def learner_of(model_path: Path, **settings: object) -> Learner:
    trainer = TrainerConfig.model_validate({"lr": 1e-2, "device": "cpu", **settings})
    return build_learner(
        TrainerRoot(run=RunConfig(steps=100), model=ModelConfig(path=str(model_path)), trainer=trainer)
    )


def judged(
    learner: Learner, groups: Sequence[sample_buffer_pb2.Group], *, advantage: str = "grpo", **settings: object
) -> Judged:
    config = TrainerConfig.model_validate({"advantage": advantage, **settings})
    judge = Judge(learner.leader, advantage_of(config), config, temperature=1.0)
    trajectories = [each for group in groups for each in group.trajectories]
    rows = [row for each in trajectories for row in rows_of(each)]
    return judge.judge(samples_of(groups), rows, torch.tensor([was_truncated(each) for each in trajectories]))


def advantages(found: Judged) -> list[float]:
    """Of the first token of each row."""
    return [float(row.advantage_P[0]) for row in found.rows]


@pytest.fixture
def other_path(tmp_path: Path) -> Path:
    """Another model with the same words."""
    path = tmp_path / "other"
    create = TinyModelConfig(words=WORDS, hidden_size=32, layers=1, context_tokens=64, seed=9)
    ensure_model(ModelConfig(path=str(path), create=create))
    return path


# --- shaping ---


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Learner:
    return learner_of(model_path)


def test_whitened_then_bounded_then_weighed_by_length(plain: Learner) -> None:
    groups = [group("a", [4, 0, 0, 0])]

    dr_grpo = advantages(judged(plain, groups, advantage="dr_grpo"))
    whitened = advantages(judged(plain, groups, advantage="dr_grpo", shaping={"whiten": True}))
    bounded = advantages(judged(plain, groups, advantage="dr_grpo", shaping={"whiten": True, "advantage_clip": 1.0}))

    assert dr_grpo == [3, -1, -1, -1]
    assert whitened == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert bounded == pytest.approx([1, *[-(3**-0.5)] * 3])


def test_rewards_are_penalised_for_length_normalised_and_bounded_before_they_are_compared(plain: Learner) -> None:
    # Each trajectory has three tokens of the policy.
    overlong = {"overlong_tokens": 4, "overlong_buffer": 2, "overlong_penalty": 1.0}

    charged = advantages(judged(plain, GROUPS[:1], advantage="reinforce", shaping=overlong))
    normalised = advantages(judged(plain, GROUPS[:1], advantage="reinforce", shaping={"reward_normalization": "batch"}))
    clipped = advantages(judged(plain, GROUPS[:1], advantage="reinforce", shaping={"reward_clip": 0.25}))

    assert charged == [0.5, -0.5, 0.5, -0.5]
    assert normalised == [1, -1, 1, -1]
    assert clipped == [0.25, 0, 0.25, 0]


def test_what_a_limit_ended_is_compared_but_not_learnt_from(plain: Learner) -> None:
    groups = [group("a", [4, 0, 0, 0])]
    groups[0].trajectories[1].outcome = trajectory_pb2.OUTCOME_TRUNCATED
    groups[0].trajectories[2].turns[3].finish_reason = trajectory_pb2.FINISH_REASON_LENGTH

    found = judged(plain, groups, advantage="dr_grpo", shaping={"drop_truncated": True})

    assert advantages(found) == [3, -1]
    assert found.metrics["dropped_rows_share"] == 0.5


def test_groups_that_always_fail_or_succeed_can_be_left_out(plain: Learner) -> None:
    groups = [group("a", [1, 1]), group("b", [1, 0]), group("c", [0, 0])]

    found = judged(plain, groups, advantage="raft", shaping={"difficulty_low": 0, "difficulty_high": 1})

    assert advantages(found) == [1, 0]


def test_segments_of_a_dropped_trajectory_are_dropped_with_it(plain: Learner) -> None:
    groups = [group("a", [1, 0])]
    first = groups[0].trajectories[0]
    again = list(first.turns)
    first.turns.extend(again)
    first.turns[len(again)].begins_segment = True
    first.outcome = trajectory_pb2.OUTCOME_TRUNCATED

    found = judged(plain, groups, shaping={"drop_truncated": True})

    assert (advantages(found), found.metrics["dropped_rows_share"]) == ([-1], pytest.approx(2 / 3))


def test_running_moments_and_a_steered_coefficient_go_on_after_a_restart(model_path: Path) -> None:
    settings = {
        "shaping": {"reward_normalization": "running"},
        "kl": {"penalty": 0.5, "penalty_estimator": "k3", "target": 5.0},
    }
    learner, resumed = learner_of(model_path, **settings), learner_of(model_path, **settings)
    learner.learn(BATCH, GROUPS)
    state = learner.state()

    resumed.restore(state)

    assert state == resumed.state()
    assert (state["reward_count"], state["reward_mean"]) == (8, 3 / 8)
    # The first batch's KL is 0, so the coefficient falls as fast as it may.
    assert state["kl_coefficient"] == pytest.approx(0.5 * 0.98)


def test_a_batch_that_is_not_finite_leaves_the_coefficient_as_it_was(model_path: Path) -> None:
    learner = learner_of(model_path, kl={"penalty": 0.5, "target": 5.0})
    reference = learner.leader._models.scorers[Role.REFERENCE]  # pyright: ignore[reportPrivateUsage]
    assert isinstance(reference, FrozenScorer)
    for param in reference.model.parameters():
        param.fill_(torch.nan)

    metrics = learner.learn(BATCH, GROUPS).metrics

    assert metrics["zero_advantage_share"] == 1
    assert learner.state()["kl_coefficient"] == 0.5


# --- the critic ---


def test_a_critic_learns_what_to_expect_and_the_policy_from_what_surprises_it(model_path: Path) -> None:
    learner = learner_of(model_path, advantage="gae", critic={"lr": 1e-2}, advantage_settings={"lam": 1.0})

    measured = [learner.learn(BATCH, GROUPS).metrics for _ in range(20)]

    # Paid and unpaid actions differ in their tokens, so all that is left is what the first token cannot know.
    assert measured[0]["critic_value"] == 0
    assert measured[0]["critic_return"] == pytest.approx(3 / 8)
    assert measured[0]["critic_explained_variance"] == pytest.approx(0, abs=1e-6)
    assert measured[-1]["critic_explained_variance"] > 0.5
    assert measured[-1]["critic_loss"] < 0.5 * measured[0]["critic_loss"]
    assert measured[-1]["skipped"] == measured[-1]["critic_skipped"] == 0


def test_while_the_critic_warms_up_the_policy_stands_still(model_path: Path) -> None:
    learner = learner_of(model_path, advantage="gae", critic={"warmup_steps": 1})
    before = [tensor.clone() for _, tensor in learner.leader.named_tensors()]
    rows = [row for each in GROUPS[0].trajectories for row in rows_of(each)]

    first = learner.learn(BATCH, GROUPS).metrics
    unmoved = [tensor.clone() for _, tensor in learner.leader.named_tensors()]
    values_P = learner.leader.score(rows, temperature=1.0, role=Role.CRITIC)
    second = learner.learn(sample_buffer_pb2.Batch(batch_id="c", step=1, policy_version=2), GROUPS).metrics

    assert all(torch.equal(a, b) for a, b in zip(before, unmoved, strict=True))
    assert values_P.any()
    assert "loss" not in first
    assert "loss" in second
    assert not all(
        torch.equal(a, b) for a, b in zip(before, [t for _, t in learner.leader.named_tensors()], strict=True)
    )


def test_a_critic_is_saved_and_loaded_with_the_policy(model_path: Path, tmp_path: Path) -> None:
    learner = learner_of(model_path, advantage="gae", critic={"lr": 1e-2})
    rows = [row for each in GROUPS[0].trajectories for row in rows_of(each)]
    learner.learn(BATCH, GROUPS)
    learner.save(tmp_path)()

    resumed = learner_of(model_path, advantage="gae", critic={"lr": 1e-2})
    resumed.load(tmp_path)

    for role in (Role.POLICY, Role.CRITIC):
        expected = learner.leader.score(rows, temperature=1.0, role=role)
        assert torch.equal(resumed.leader.score(rows, temperature=1.0, role=role), expected)
        assert expected.any()
    after = [each.learn(BATCH, GROUPS).metrics for each in (learner, resumed)]
    assert after[0] == after[1]


# --- the reference ---


def test_the_reference_is_what_the_run_began_with_and_stays_so(model_path: Path) -> None:
    learner = learner_of(model_path, kl={"penalty": 0.1, "penalty_estimator": "k3", "loss": 0.1})

    first, *_, last = [learner.learn(BATCH, GROUPS).metrics for _ in range(5)]

    assert first["kl_charged"] == first["kl_reference"] == 0
    assert last["kl_charged"] > 1e-4
    assert last["kl_reference"] > 1e-4
    assert last["kl_coefficient"] == 0.1


def test_without_a_weight_there_is_no_reference(model_path: Path, plain: Learner) -> None:
    assert plain.leader.roles == {Role.POLICY}
    assert learner_of(model_path, kl={"loss_estimator": "full"}).leader.roles == {Role.POLICY}
    assert learner_of(model_path, kl={"loss": 0.1}).leader.roles == {Role.POLICY, Role.REFERENCE}


def test_tokens_are_charged_for_what_they_are_away_from_the_reference(model_path: Path, other_path: Path) -> None:
    learner = learner_of(model_path, kl={"penalty": 0.5, "reference": str(other_path)})
    rows = [row for each in GROUPS[0].trajectories for row in rows_of(each)]
    policy_P, reference_P = (
        learner.leader.score(rows, temperature=1.0, role=role).double() for role in (Role.POLICY, Role.REFERENCE)
    )

    found = judged(learner, GROUPS[:1], advantage="reinforce", kl={"penalty": 0.5, "reference": str(other_path)})

    kl_NT = (policy_P - reference_P).reshape(4, 3)
    rewards_N = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)
    expected = rewards_N[:, None] - 0.5 * kl_NT.flip(1).cumsum(1).flip(1)
    assert torch.allclose(torch.tensor([row.advantage_P.tolist() for row in found.rows]).double(), expected, atol=1e-5)
    assert kl_NT.abs().max() > 1e-3


def test_kl_in_the_loss_holds_the_policy_near_the_reference(model_path: Path) -> None:
    free, held = learner_of(model_path, kl={"loss": 1e-9}), learner_of(model_path, kl={"loss": 5.0})

    away, near = ([each.learn(BATCH, GROUPS).metrics["kl_reference"] for _ in range(5)][-1] for each in (free, held))

    assert near < 0.5 * away


def test_a_full_kl_is_the_sum_over_all_words_where_the_policys_tokens_stand(model_path: Path, other_path: Path) -> None:
    # Rewards agree, so that nothing but the KL teaches; and no column is asked for it.
    kl = {"loss": 1.0, "loss_estimator": "full", "reference": str(other_path)}
    learner, groups = learner_of(model_path, kl=kl), [group("a", [1, 1])]
    rows = [row for each in groups[0].trajectories for row in rows_of(each)]
    policy, reference = (AutoModelForCausalLM.from_pretrained(path).double() for path in (model_path, other_path))

    first, *_, last = [learner.learn(BATCH, groups).metrics for _ in range(20)]

    expected = torch.cat([whole_kl(policy, reference, row) for row in rows])
    expected.mean().backward()
    norm = torch.cat([param.grad.flatten() for param in policy.parameters() if param.grad is not None]).norm().item()
    assert first["kl_reference"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert last["kl_reference"] < 0.1 * first["kl_reference"]
    assert not any(row.reference_logp_P.any() for row in judged(learner, groups, kl=kl).rows)


def test_a_full_kl_to_the_beginning_is_0_there_and_adapters_are_held_near_it_too(model_path: Path) -> None:
    kl = {"loss": 0.1, "loss_estimator": "full"}

    for lora in (None, {"rank": 2}):
        learner = learner_of(model_path, kl=kl, lora=lora)
        first, second = [learner.learn(BATCH, GROUPS).metrics for _ in range(2)]

        assert first["kl_reference"] == pytest.approx(0, abs=1e-7)
        assert second["kl_reference"] > 1e-6
        assert first["entropy"] == pytest.approx(learner_of(model_path).learn(BATCH, GROUPS).metrics["entropy"])


def whole_kl(policy: Any, reference: Any, row: Row) -> torch.Tensor:
    """f64[P], from the models themselves."""
    ids_T, at_P = torch.tensor(row.ids_T).long(), torch.tensor(row.mask_T).nonzero()[:, 0]
    with torch.no_grad():
        lq_TV = torch.log_softmax(reference(input_ids=ids_T[None]).logits[0], dim=-1)
    lp_TV = torch.log_softmax(policy(input_ids=ids_T[None]).logits[0], dim=-1)
    return (lp_TV.exp() * (lp_TV - lq_TV)).sum(-1)[at_P - 1]


# --- the teacher ---


def test_a_teacher_pays_each_token_whatever_its_reward(model_path: Path, other_path: Path) -> None:
    learner = learner_of(model_path, advantage="opd", teacher={"path": str(other_path)}, lr=1e-3)
    rows = [row for each in GROUPS[0].trajectories for row in rows_of(each)]
    policy_P, teacher_P = (
        learner.leader.score(rows, temperature=1.0, role=role) for role in (Role.POLICY, Role.TEACHER)
    )

    found = judged(learner, GROUPS[:1], advantage="opd", teacher={"path": str(other_path)})
    added = judged(learner, GROUPS[:1], advantage="dr_grpo", teacher={"path": str(other_path), "coef": 0.5})

    gap_NT = (teacher_P - policy_P).reshape(4, 3)
    assert torch.allclose(torch.tensor([row.advantage_P.tolist() for row in found.rows]), gap_NT, atol=1e-5)
    expected = torch.tensor([0.5, -0.5, 0.5, -0.5])[:, None] + 0.5 * gap_NT
    assert torch.allclose(torch.tensor([row.advantage_P.tolist() for row in added.rows]), expected, atol=1e-5)
    assert found.metrics["kl_teacher"] == pytest.approx(-float(gap_NT.mean()), abs=1e-5)


def test_the_policy_comes_nearer_to_its_teacher(model_path: Path, other_path: Path) -> None:
    def gap(learner: Learner) -> float:
        policy_P, teacher_P = (
            learner.leader.score(rows, temperature=1.0, role=role) for role in (Role.POLICY, Role.TEACHER)
        )
        return float((policy_P - teacher_P).abs().mean())

    rows = [row for each in GROUPS[0].trajectories for row in rows_of(each)]
    learner = learner_of(model_path, advantage="opd", teacher={"path": str(other_path)}, lr=1e-3, loss="reinforce")
    before = gap(learner)

    for _ in range(8):
        learner.learn(BATCH, GROUPS)

    assert gap(learner) < 0.9 * before


# --- ranks ---


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("backend", "estimator"), [("torch", "k3"), ("torch", "full"), ("fsdp2", "full"), ("deepspeed", "full")]
)
def test_two_ranks_judge_and_learn_as_one(model_path: Path, other_path: Path, backend: str, estimator: str) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    alone = learnt(str(model_path), str(other_path), "torch", estimator)
    together = _learnt_by_two(model_path, other_path, backend, estimator)

    assert alone[-1]["critic_loss"] > 0
    assert alone[-1]["kl_charged"] > 0
    assert alone[-1]["kl_reference"] > 0
    assert "kl_teacher" in alone[-1]
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, abs=1e-4)


def _learnt_by_two(model_path: Path, other_path: Path, backend: str, estimator: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "tests.trainer.judging_rank", str(model_path), str(other_path), backend, estimator]
    meeting = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in {**meeting, "RANK": rank}.items()}},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return json.loads(outputs[0].splitlines()[-1])


# --- what does not go together ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "gae"}, r"'gae' needs a critic. Add \[trainer.critic\]"),
        ({"critic": {}}, "'grpo' does not ask it"),
        ({"advantage": "opd"}, "'opd' needs a teacher. Give its model by trainer.teacher.path"),
        ({"teacher": {"path": "owner/name"}}, r"Set trainer.teacher.coef above 0"),
        (
            {"kl": {"loss": 0.1}, "warm_start": {"data": __file__}},
            "trainer.kl.reference: empty, which is the model before the warm start",
        ),
        (
            {"kl": {"loss": 0.1, "loss_estimator": "full"}, "backend": "megatron"},
            "'full' sums over the vocabulary, which the backend 'megatron' cuts over ranks",
        ),
    ],
)
def test_an_algorithm_and_its_models_have_to_agree(settings: dict[str, object], message: str) -> None:
    root = TrainerRoot(model=ModelConfig(path="owner/name"), trainer=TrainerConfig.model_validate(settings))

    with pytest.raises(ConfigError, match=message):
        root.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": {"target": 6.0}}, "Give penalty a first value"),
        ({"kl": {"penalty": 0.1, "penalty_estimator": "full"}}, "penalty_estimator"),
        ({"shaping": {"overlong_tokens": 4, "overlong_buffer": 5}}, "overlong_buffer is more than overlong_tokens"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig.model_validate(settings)


def test_a_model_of_another_vocabulary_cannot_judge(model_path: Path, other_path: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    create = TinyModelConfig(words=WORDS + " north", hidden_size=32, layers=1, context_tokens=64)
    ensure_model(ModelConfig(path=str(foreign), create=create))
    model = ModelConfig(path=str(model_path))

    check_vocabularies(model, TrainerConfig.model_validate({"teacher": {"path": str(other_path)}}))

    with pytest.raises(ConfigError, match=r"trainer\.teacher\.path: .* has another vocabulary than model.path"):
        check_vocabularies(model, TrainerConfig.model_validate({"teacher": {"path": str(foreign)}}))
    nowhere = TrainerConfig.model_validate({"kl": {"loss": 0.1, "reference": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"trainer\.kl\.reference: the tokenizer of .* cannot be loaded"):
        check_vocabularies(model, nowhere)
