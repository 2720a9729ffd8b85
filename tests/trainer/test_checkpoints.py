from pathlib import Path

from trainer.checkpoints import Checkpoints, CheckpointState


def state(step: int) -> CheckpointState:
    return CheckpointState("run", step, policy_version=step + 1, last_batch_id=f"batch-{step}")


def writes(text: str):
    def write(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return write


def test_the_newest_are_kept_and_what_was_never_completed_goes_with_the_older_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run_id="run", keep=2)
    (tmp_path / ".step-000002.killed.partial").mkdir()
    (tmp_path / ".step-000006.alive.partial").mkdir()

    for step in (2, 4, 6):
        checkpoints.save(state(step), writes(str(step)))

    assert {path.name for path in tmp_path.iterdir()} == {"step-000004", "step-000006", ".step-000006.alive.partial"}
    assert checkpoints.newest() == (tmp_path / "step-000006", state(6))


def test_two_that_write_the_same_step_never_mix_their_files(tmp_path: Path) -> None:
    checkpoints, replaced = (Checkpoints(tmp_path, run_id="run", keep=2) for _ in range(2))

    def slowly(folder: Path) -> None:
        (folder / "weights").write_text("slow")
        replaced.save(state(2), writes("fast"))
        (folder / "optimizer").write_text("slow")

    path = checkpoints.save(state(2), slowly)

    assert {file.name for file in path.iterdir()} == {"weights", "state.json"}
    assert (path / "weights").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [path]
