import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollfarm.config import ConfigError
from tests.trainer.disks import FullDisk
from trainer.backends.replicated import ReplicatedBackend
from trainer.checkpoints import Checkpoints, CheckpointState, replace_folder
from trainer.disk import os_errors
from trainer.ranks import Leader, Models, Role


def state(step: int) -> CheckpointState:
    return CheckpointState("run", step, policy_version=step + 1, last_batch_id=f"batch-{step}")


def save(checkpoints: Checkpoints, step: int) -> Path:
    work = checkpoints.begin(step)
    (work / "weights").write_text(str(step))
    return checkpoints.complete(work, state(step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_killed_trainers_left_incomplete_is_swept_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", run_id="run", keep=2)
    whole = save(checkpoints, 2)
    for _ in range(3):
        (checkpoints.begin(4) / "weights").write_text("half")

    checkpoints.sweep()

    assert names(tmp_path / "checkpoints") == {whole.name}
    Checkpoints(tmp_path / "never", run_id="run", keep=2).sweep()


def test_the_newest_are_kept_and_what_was_never_completed_goes_with_the_older_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run_id="run", keep=2)
    (tmp_path / ".step-000002.killed.partial").mkdir()
    (tmp_path / ".step-000006.alive.partial").mkdir()

    for step in (2, 4, 6):
        save(checkpoints, step)
    (tmp_path / "step-000008").mkdir()

    assert names(tmp_path) == {"step-000004", "step-000006", ".step-000006.alive.partial", "step-000008"}
    assert checkpoints.newest() == (tmp_path / "step-000006", state(6))


def test_two_that_write_the_same_step_never_mix_their_files(tmp_path: Path) -> None:
    checkpoints, replaced = (Checkpoints(tmp_path, run_id="run", keep=2) for _ in range(2))

    slow = checkpoints.begin(2)
    (slow / "weights").write_text("slow")
    fast = replaced.begin(2)
    (fast / "weights").write_text("fast")
    replaced.complete(fast, state(2))
    (slow / "optimizer").write_text("slow")
    path = checkpoints.complete(slow, state(2))

    assert names(path) == {"weights", "state.json"}
    assert (path / "weights").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [path]


def test_those_that_validated_best_are_kept_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run_id="run", keep=1, keep_best=2)

    for step, value in ((2, 0.5), (4, 0.9), (6, None), (8, 0.1), (10, 0.7), (12, 0.2)):
        save(checkpoints, step)
        if value is not None:
            checkpoints.validated(step, value)

    assert names(tmp_path) == {"step-000004", "step-000010", "step-000012"}
    assert Checkpoints(tmp_path, run_id="run", keep=1, keep_best=2).newest() == (tmp_path / "step-000012", state(12))


def test_of_equally_good_ones_the_later_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run_id="run", keep=1, keep_best=1)

    for step in (2, 4, 6):
        save(checkpoints, step)
        checkpoints.validated(step, 0.5 if step < 6 else 0.25)

    assert names(tmp_path) == {"step-000004", "step-000006"}


def test_what_the_learner_carries_comes_back_to_the_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run_id="run", keep=2)
    carried = replace(state(2), learner={"kl": {"coefficient": math.pi / 7}, "seen": [1, 2]})

    checkpoints.complete(checkpoints.begin(2), carried)

    found = checkpoints.newest()
    assert found is not None
    assert found[1] == carried


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path, run_id="run", keep=2), 2)
    file = path / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "moon": "full"}))

    with pytest.raises(ConfigError, match="moon, which this version does not know"):
        Checkpoints(tmp_path, run_id="run", keep=2).newest()


def test_a_model_that_there_is_no_room_for_leaves_the_one_before(full_disk: FullDisk) -> None:
    path = full_disk.folder / "model"
    replace_folder(path, lambda folder: write(folder / "weights", "old"))
    full_disk.fill()

    with pytest.raises(OSError, match="No space left"):
        replace_folder(path, lambda folder: write(folder / "weights", "new"))

    assert (path / "weights").read_text() == "old"
    assert names(full_disk.folder) == {"model", "ballast"}


def write(path: Path, text: str) -> None:
    path.write_text(text)


def test_no_room_for_tensors_is_an_error_of_the_system(full_disk: FullDisk) -> None:
    full_disk.fill()

    with pytest.raises(OSError, match="No space left") as refused, os_errors():
        save_file({"weights": torch.zeros(100_000)}, full_disk.folder / "weights.safetensors")

    assert refused.value.errno == errno.ENOSPC


def test_random_numbers_go_on_where_the_checkpoint_was_taken(backend: ReplicatedBackend, tmp_path: Path) -> None:
    leader = Leader(Models({Role.POLICY: backend}), {})
    torch.manual_seed(5)
    leader.save(tmp_path)()
    first = torch.rand(3)
    torch.manual_seed(7)

    leader.load(tmp_path)

    assert torch.equal(torch.rand(3), first)
