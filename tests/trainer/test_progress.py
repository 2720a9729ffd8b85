import json
from pathlib import Path

from rollfarm.v1 import trainer_pb2
from trainer.checkpoints import Checkpoints, CheckpointState
from trainer.progress import Progress, StepReport, ValidationReport


def step(number: int) -> StepReport:
    return StepReport(number, 0.5, {"loss": 1.0}, 0.1, 0.2, 0.3, policy_version=number + 1, time=float(number))


def validation(step_count: int) -> ValidationReport:
    return ValidationReport(step_count, 0.5, {"success": 0.25}, 8, policy_version=1, time=step_count - 0.5)


def test_progress_tells_the_last_step_or_all_from_one_on(tmp_path: Path) -> None:
    progress = Progress("run", 10, tmp_path / "metrics.jsonl")
    for number in range(3):
        progress.stepped(step(number))

    assert [each.step for each in progress.to_proto(None).steps] == [2]
    assert [each.step for each in progress.to_proto(1).steps] == [1, 2]
    assert progress.to_proto(None).step_count == 3
    assert progress.to_proto(None).phase == trainer_pb2.PHASE_LOADING
    assert progress.to_proto(None).steps[0].train_duration.ToMilliseconds() == 200


def test_a_resumed_run_cuts_its_metrics_back_to_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    before = Progress("run", 10, file)
    for report in (validation(0), step(0), step(1), validation(2), step(2)):
        before.validated(report) if isinstance(report, ValidationReport) else before.stepped(report)
    with file.open("a") as broken:
        broken.write('{"kind": "step", "st')

    resumed = Progress("run", 10, file)
    resumed.resume(2)

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["kind"], line.get("step", line.get("step_count"))) for line in lines] == [
        ("validation", 0),
        ("step", 0),
        ("step", 1),
        ("validation", 2),
    ]
    assert resumed.has_validation(0)
    assert [each.step for each in resumed.steps] == [0, 1]


def test_only_complete_checkpoints_count_and_the_oldest_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run_id="run", keep=2)
    for count in (5, 10, 15):
        checkpoints.save(CheckpointState("run", count, count, f"batch-{count}"), lambda folder: None)
    (tmp_path / "step-000020").mkdir()
    (tmp_path / ".step-000025.partial").mkdir()

    newest = checkpoints.newest()

    assert newest is not None
    assert newest[1] == CheckpointState("run", 15, 15, "batch-15")
    assert not (tmp_path / "step-000005").exists()
    assert (tmp_path / "step-000010").exists()
