import json
import math
from itertools import combinations
from pathlib import Path

import pytest

from rollfarm.config import ConfigError
from rollfarm.run import DomainConfig, ModelConfig, RunConfig, SamplingConfig
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from trainer.config import TrainerConfig, TrainerRoot
from trainer.evaluation.__main__ import spec_of
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.estimates import Estimate, over_tasks, pass_at_k
from trainer.evaluation.results import Results, TaskResult, summarise, task_result


def task(step: int, domain: str = "a", number: int = 0, values: tuple[float, ...] = (1.0, 0.0)) -> TaskResult:
    return TaskResult(step, domain, number, f"g{step}", list(values), list(values))


@pytest.mark.parametrize(
    ("samples", "passed", "k"), [(n, c, k) for n in (1, 4, 6) for c in range(n + 1) for k in (1, n)]
)
def test_pass_at_k_is_the_share_of_the_ways_to_choose_k_episodes_in_which_one_passed(samples: int, passed: int, k: int):
    ways = list(combinations([1] * passed + [0] * (samples - passed), k))

    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, ways)) / len(ways))


def test_pass_at_k_by_hand_and_where_binomials_would_overflow():
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / 10)
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@3 of 2 samples"):
        pass_at_k(2, 1, 3)


def test_an_interval_is_clustered_by_task_and_stays_within_its_bounds():
    found = over_tasks([0.0, 1.0, 1.0, 0.0], lowest=0.0, highest=1.0)
    error = math.sqrt(4 * 0.25 / (4 * 3))

    assert found.value == 0.5
    assert found.low == pytest.approx(max(0.0, 0.5 - 1.959964 * error), abs=1e-6)
    assert found.high == 1.0 or found.high == pytest.approx(0.5 + 1.959964 * error, abs=1e-6)
    assert over_tasks([0.25]) == Estimate(0.25, None, None)


def test_more_episodes_of_the_same_tasks_do_not_narrow_an_interval():
    config = EvaluationConfig(samples=8, k=[1])
    once = [task(n, values=(float(n % 2),) * 2) for n in range(6)]
    often = [task(n, values=(float(n % 2),) * 8) for n in range(6)]

    of_2 = summarise(once, EvaluationConfig(samples=2), model="m", dropped={})["all"]
    of_8 = summarise(often, config, model="m", dropped={})["all"]

    assert isinstance(of_2, dict)
    assert isinstance(of_8, dict)
    assert of_2["pass@1"] == of_8["pass@1"]


def test_a_result_tells_each_domain_and_all_tasks_together():
    tasks = [task(0, "a", 0, (1.0, 0.5)), task(0, "b", 0, (0.0, 0.0)), task(1, "a", 1, (0.5, 0.5))]

    found = summarise(tasks, EvaluationConfig(samples=2, k=[1, 2]), model="m", dropped={"failed": 2})

    domains = found["domains"]
    assert isinstance(domains, dict)
    assert domains["a"]["avg@2"]["value"] == pytest.approx(0.625)
    assert domains["a"]["pass@1"]["value"] == pytest.approx(0.25)
    assert domains["a"]["pass@2"]["value"] == pytest.approx(0.5)
    assert domains["b"]["pass@2"] == {"value": 0.0, "low": None, "high": None}
    assert isinstance(found["all"], dict)
    assert found["all"]["avg@2"]["value"] == pytest.approx(1.25 / 3)
    assert (found["all"]["tasks"], found["all"]["episodes"]) == (3, 6)
    assert found["dropped_groups"] == {"failed": 2}


def test_results_that_were_not_committed_are_cut_off_and_missing_ones_are_found(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    first = Results(file)
    for step in range(3):
        first.add([task(step)])
    with file.open("a") as broken:
        broken.write('{"step": 3, "dom')

    second = Results(file)
    second.resume(2)

    assert second.tasks == [task(0), task(1)]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1]
    with pytest.raises(ConfigError, match="results are missing of the 3 deliveries"):
        second.resume(3)


def test_a_metric_that_a_domain_does_not_measure_is_named_with_those_that_it_does():
    one = trajectory_pb2.Trajectory(reward=0.5, metrics={"success": 1.0})
    group = sample_buffer_pb2.Group(group_id="g", trajectories=[one, one])
    group.task.domain = "maths"

    assert task_result(0, group, "success").values == [1.0, 1.0]
    assert task_result(0, group, "reward").values == [0.5, 0.5]
    with pytest.raises(ConfigError, match=r"'maths' does not measure 'sucess'\. Did you mean 'success'"):
        task_result(0, group, "sucess")


def test_pass_at_more_than_the_samples_is_refused_when_the_configuration_is_read(model_path: Path):
    root = TrainerRoot(
        model=ModelConfig(path=str(model_path)), trainer=TrainerConfig(evaluation=EvaluationConfig(samples=4, k=[1, 8]))
    )

    with pytest.raises(ConfigError, match=r"pass@8 cannot be estimated from 4 samples"):
        root.check()


def test_an_evaluation_plays_held_out_tasks_of_every_domain_alike_as_validation_samples():
    domains = [DomainConfig(name=name, environment="e", weight=weight) for name, weight in (("a", 5.0), ("b", 0.5))]
    run = RunConfig(domains=domains, redundant_groups=2, validation_sampling=SamplingConfig(temperature=0.0))
    root = TrainerRoot(run=run, trainer=TrainerConfig(evaluation=EvaluationConfig(tasks=7, samples=3)))

    spec = spec_of(root)

    assert (spec.batch_groups, spec.group_size, spec.step_count, spec.held_out) == (2, 3, 7, True)
    assert [domain.weight for domain in spec.domains] == [1.0, 1.0]
    assert (spec.redundant_groups, spec.sampling.temperature) == (0, 0.0)
