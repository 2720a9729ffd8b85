"""What becomes of a model that is exported: ranks that wait, and disks that are full."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollfarm.ports import free_port
from tests.trainer.conftest import ROOT
from tests.trainer.disks import FullDisk
from tests.trainer.export_rank import TIMEOUT_SECONDS
from trainer.backends.replicated import ReplicatedBackend

SECONDS = 120.0


@pytest.mark.slow
def test_ranks_wait_for_rank_0_as_long_as_it_writes(model_path: Path, tmp_path: Path) -> None:
    slow_file = tmp_path / "config.json"
    os.mkfifo(slow_file)  # Whoever opens it waits for a reader.
    port = free_port()
    ranks = [start(model_path, tmp_path, rank, port) for rank in (0, 1)]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline().strip() == "begun"

        time.sleep(1.5 * TIMEOUT_SECONDS)
        with slow_file.open() as reader:
            slow_file.unlink()
            reader.read()

        errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
    finally:
        for rank in ranks:
            rank.kill()
    assert (tmp_path / "model.safetensors").is_file()


def test_a_disk_without_room_for_the_export_is_an_os_error(backend: ReplicatedBackend, full_disk: FullDisk) -> None:
    full_disk.fill()

    with pytest.raises(OSError, match="No space left"):
        backend.export(full_disk.folder)


def start(model: Path, folder: Path, rank: int, port: int) -> "subprocess.Popen[str]":
    meeting = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.export_rank", str(model), str(folder)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in meeting.items()}, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
