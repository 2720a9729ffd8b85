import json
from pathlib import Path

from rollfarm.v1 import trainer_pb2
from tests.trainer.disks import FullDisk
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


def test_validations_after_the_checkpoint_are_kept_as_far_as_batches_were_delivered(tmp_path: Path) -> None:
    progress = Progress("run", 10, tmp_path / "metrics.jsonl")
    for number in range(4):
        progress.stepped(step(number))
        progress.validated(validation(number + 1))

    resumed = Progress("run", 10, tmp_path / "metrics.jsonl")
    resumed.resume(2, validated_until=3)

    assert [each.step for each in resumed.steps] == [0, 1]
    assert [each.step_count for each in resumed.validations] == [1, 2, 3]


def test_lines_without_room_are_written_once_there_is_room(full_disk: FullDisk) -> None:
    progress = Progress("run", 10, full_disk.folder / "metrics.jsonl")
    full_disk.fill()
    for number in range(3):
        progress.stepped(step(number))
    assert not (full_disk.folder / "metrics.jsonl").read_text()

    full_disk.free()
    progress.catch_up()
    progress.stepped(step(3))

    lines = (full_disk.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
