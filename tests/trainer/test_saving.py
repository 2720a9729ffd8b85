"""Checkpoints that are written beside training, by real files and threads."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.trainer.disks import FullDisk
from trainer.backends import Write
from trainer.checkpoints import Checkpoints, CheckpointState
from trainer.saving import Saver

SECONDS = 10.0


def state(step: int) -> CheckpointState:
    return CheckpointState("run", step, step, f"batch-{step}")


@dataclass
class Writer:
    """Writes when it may."""

    size: int = 10
    may: threading.Event = field(default_factory=threading.Event)
    copied: list[str] = field(default_factory=list[str])

    async def copy(self, folder: Path) -> Write:
        self.copied.append(folder.name.partition(".partial")[0][1:12])

        def write() -> None:
            assert self.may.wait(SECONDS)
            (folder / "weights").write_bytes(b"w" * self.size)

        return write


@asynccontextmanager
async def saver(folder: Path, committed: list[int]) -> AsyncIterator[Saver]:
    async def commit(state: CheckpointState, path: Path) -> None:
        assert (path / "state.json").is_file()
        committed.append(state.step_count)

    async with asyncio.TaskGroup() as group:
        yield Saver(Checkpoints(folder, run_id="run", keep=2), commit, group)


async def test_the_caller_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    committed: list[int] = []
    slow, fast = Writer(), Writer()
    fast.may.set()
    async with saver(tmp_path, committed) as saves:
        await saves.begin(state(3), slow.copy)
        assert committed == []
        second = asyncio.create_task(saves.begin(state(6), fast.copy))
        await asyncio.wait({second}, timeout=0.1)
        assert (second.done(), fast.copied) == (False, [])

        slow.may.set()
        await second
        assert committed == [3]
        await saves.settled()

    assert committed == [3, 6]
    assert sorted(os.listdir(tmp_path)) == ["step-000003", "step-000006"]  # noqa: PTH208


async def test_without_room_nothing_is_committed_or_left_and_the_next_one_is_tried(full_disk: FullDisk) -> None:
    committed: list[int] = []
    writer = Writer(size=100_000)
    writer.may.set()
    folder = full_disk.folder / "checkpoints"
    folder.mkdir()
    full_disk.fill()
    async with saver(folder, committed) as saves:
        await saves.begin(state(3), writer.copy)
        await saves.settled()
        assert "No space left" in str(saves.problem)
        assert (committed, list(folder.iterdir())) == ([], [])

        full_disk.free()
        await saves.begin(state(6), writer.copy)
        await saves.settled()

    assert saves.problem is None
    assert committed == [6]


async def test_an_error_that_is_not_of_the_disk_takes_the_trainer_down_at_once(tmp_path: Path) -> None:
    async def copy(folder: Path) -> Write:
        def write() -> None:
            raise RuntimeError("rank 1 is gone")

        return write

    async def save() -> None:
        async with saver(tmp_path, []) as saves:
            await saves.begin(state(3), copy)
            await asyncio.sleep(SECONDS)

    with pytest.raises(ExceptionGroup) as failed:
        await save()

    assert "rank 1 is gone" in str(failed.value.exceptions[0])
