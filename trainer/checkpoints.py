"""Checkpoints: complete folders, newest kept, written beside their place and renamed into it.

A folder checkpoints/step-000123 holds every step below 123. What has no state.json was never completed.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rollfarm.config import ConfigError

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Where the run stood."""

    run_id: str
    """The run; a checkpoint of another one is refused."""

    step_count: int
    """Steps that the weights were trained on."""

    policy_version: int
    """The newest version published then. Later ones may have been published since."""

    last_batch_id: str
    """The batch of the last step; empty when there was none."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, run_id: str, keep: int) -> None:
        self.folder = folder
        self._run_id = run_id
        self._keep = keep

    def newest(self) -> tuple[Path, CheckpointState] | None:
        """The newest complete one. Raises ConfigError when it belongs to another run."""
        complete = self._complete()
        if not complete:
            return None
        path = complete[-1]
        state = CheckpointState(**json.loads((path / STATE_FILE).read_text()))
        if state.run_id != self._run_id:
            raise ConfigError(
                f"{path}: belongs to the run {state.run_id!r}, not to {self._run_id!r}. Choose another run.folder."
            )
        return path, state

    def save(self, state: CheckpointState, write: Callable[[Path], None]) -> Path:
        """Write one, durable when this returns, and drop the oldest. `write` fills an existing folder.

        A trainer that was replaced and has not heard of it may write the same: each has a folder of its own to fill,
        and the first one there wins.
        """
        path = self.folder / f"step-{state.step_count:06d}"
        if _is_complete(path):
            return path
        shutil.rmtree(path, ignore_errors=True)
        work = self.folder / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
        work.mkdir(parents=True)
        write(work)
        (work / STATE_FILE).write_text(json.dumps(asdict(state)))
        for file in (*work.iterdir(), work):
            _sync(file)
        if _is_complete(path):
            shutil.rmtree(work)
        else:
            work.rename(path)
        _sync(self.folder)
        self._drop_old()
        return path

    def _drop_old(self) -> None:
        complete = self._complete()
        oldest = _step(complete[-self._keep :][0])
        partial = self.folder.glob(".step-*")
        for old in [path for path in (*complete, *partial) if _step(path) < oldest]:
            shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        return sorted(filter(_is_complete, self.folder.glob("step-*")), key=_step)


def _is_complete(path: Path) -> bool:
    return (path / STATE_FILE).is_file()


def _step(path: Path) -> int:
    return int(path.name.lstrip(".").removeprefix("step-").partition(".")[0])


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Fill `path` anew: whole or not at all, but for the moment between two renames when it was there before."""
    work, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in (work, old):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir(parents=True)
    write(work)
    if path.exists():
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the file or folder on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
