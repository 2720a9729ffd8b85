import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from tests.trainer.conftest import trajectory
from trainer.batch_measures import buffer_measures, measured
from trainer.learner import with_lag
from trainer.rows import rows_of
from trainer.sample_table import SampleFile, choose, table_of


def played(domain: str, group: str, rewards: Sequence[float], *, version: int = 1) -> list[trajectory_pb2.Trajectory]:
    made: list[trajectory_pb2.Trajectory] = []
    for member, reward in enumerate(rewards):
        one = trajectory(reward, version=version, name=f"{group}-{member}")
        one.group_id = group
        one.task.domain, one.task.environment, one.task.index = domain, f"{domain}_world", 5
        made.append(one)
    return made


def test_a_batch_is_measured_as_a_whole_and_by_domain_and_environment() -> None:
    maths = played("maths", "g0", [1.0, 0.0]) + played("maths", "g1", [1.0, 1.0])
    lake = played("lake", "g2", [0.0, 0.5], version=3)
    lake[0].outcome = trajectory_pb2.OUTCOME_TRUNCATED
    batch = maths + lake

    found = measured(batch, [with_lag(rows_of(each), 4) for each in batch])

    assert found["domain/maths/reward"] == pytest.approx(0.75)
    assert found["domain/maths/episode_success"] == pytest.approx(0.75)
    assert found["domain/maths/episodes"] == 4
    assert found["domain/maths/equal_rewards_share"] == pytest.approx(0.5)
    assert found["domain/maths/staleness"] == 3
    assert found["domain/lake/staleness"] == 1
    assert found["domain/lake/reward_std"] == pytest.approx(0.25)
    assert found["domain/lake/episode_truncated"] == pytest.approx(0.5)
    assert found["environment/lake_world/reward"] == pytest.approx(0.25)
    assert found["staleness"] == pytest.approx(14 / 6)
    assert found["equal_rewards_share"] == pytest.approx(2 / 6)
    assert found["episode_tokens"] == 6
    assert found["episode_policy_tokens"] == 3


def test_nothing_is_measured_of_no_trajectories() -> None:
    assert measured([], []) == {}


def test_what_sample_buffer_dropped_is_told_as_shares_by_reason_and_by_length() -> None:
    status = sample_buffer_pb2.GetStatusResponse(
        next_group_index=40,
        dropped_group_counts={"zero_variance": 10, "failed": 2},
        outcome_counts={"OUTCOME_OK": 90, "OUTCOME_ENV_FAILED": 3},
        length_quartiles=[
            sample_buffer_pb2.LengthQuartile(episode_count=20),
            sample_buffer_pb2.LengthQuartile(episode_count=20, dropped_counts={"redundant": 4, "stale": 1}),
        ],
    )

    assert buffer_measures(status) == {
        "dropped_share/zero_variance": 0.25,
        "dropped_share/failed": 0.05,
        "dropped_share/length_1": 0.0,
        "dropped_share/length_2": 0.25,
        "outcome_count/ok": 90.0,
        "outcome_count/env_failed": 3.0,
    }


def group(name: str, domain: str) -> sample_buffer_pb2.Group:
    made = sample_buffer_pb2.Group(group_id=name, trajectories=played(domain, name, [0.25, 1.0]))
    made.task.domain = domain
    return made


def test_a_table_takes_the_domains_in_turn_and_each_group_before_any_twice() -> None:
    groups = [group("a0", "a"), group("a1", "a"), group("b0", "b")]

    chosen = [each.trajectory_id for each in choose(groups, 5)]

    assert chosen == ["a0-0", "b0-0", "a1-0", "b0-1", "a0-1"]


def test_a_sample_shows_every_token_as_text_and_how_its_reward_is_made_up(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    shown = group("a0", "a")
    first = shown.trajectories[0]
    first.reward_parts.add(name="exact", value=0.5, weight=0.5)
    first.turns[1].engine_id = first.turns[3].engine_id = "engine-0"

    (sample,) = table_of(7, [shown], count=1, decoder=tokenizer)

    assert sample.text == tokenizer.decode([8, 9, 7, 10, 7, 2])
    assert "<end>" in sample.text
    assert (sample.step, sample.domain, sample.environment, sample.task) == (7, "a", "a_world", 5)
    assert (sample.reward, sample.reward_parts, sample.outcome) == (0.25, {"exact": 0.25}, "OK")
    assert (sample.policy_version, sample.engine, sample.tokens) == (1, "engine-0", 3)


def test_a_resumed_run_cuts_its_samples_back_to_its_checkpoint(model_path: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    file = SampleFile(tmp_path / "samples.jsonl")
    for step in (0, 10):
        file.append(table_of(step, [group("a0", "a")], count=2, decoder=tokenizer))
    with (tmp_path / "samples.jsonl").open("a") as broken:
        broken.write('{"step": 1')

    file.cut(10)

    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [0, 0]
