"""Checkpoints: complete folders, written beside their place and renamed into it; the newest are kept, and the best.

A folder checkpoints/step-000123 holds every step below 123. What has no state.json was never completed.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import structlog

from rollfarm.config import ConfigError

log = structlog.get_logger()

STATE_FILE = "state.json"
VALIDATION_FILE = "validation.json"

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

LearnerState = Mapping[str, Json]
"""What a learner carries from step to step beside weights and optimiser, such as the coefficient of an adaptive KL
penalty. Floats survive JSON to the bit."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Where the run stood."""

    run_id: str
    """The run; a checkpoint of another one is refused."""

    step_count: int
    """Steps that the weights were trained on. Learning rates are a function of it."""

    policy_version: int
    """The newest version published then. Later ones may have been published since."""

    last_batch_id: str
    """The batch of the last step; empty when there was none."""

    learner: LearnerState = field(default_factory=dict[str, Json])
    """What the learner carries besides."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, run_id: str, keep: int, keep_best: int = 0) -> None:
        self.folder = folder
        self._run_id = run_id
        self._keep = keep
        self._keep_best = keep_best

    def newest(self) -> tuple[Path, CheckpointState] | None:
        """The newest complete one. Raises ConfigError when it belongs to another run."""
        complete = self._complete()
        if not complete:
            return None
        path = complete[-1]
        _sync(self.folder)  # It may have got its name just before a crash.
        state = _read_state(path)
        if state.run_id != self._run_id:
            raise ConfigError(
                f"{path}: belongs to the run {state.run_id!r}, not to {self._run_id!r}. Choose another run.folder."
            )
        return path, state

    def find(self, step_count: int) -> Path | None:
        """The complete one of those steps."""
        path = self._place(step_count)
        return path if _is_complete(path) else None

    def begin(self, step_count: int) -> Path:
        """A folder to fill, for `complete` or `abandon`. Raises OSError.

        A trainer that was replaced and has not heard of it may write the same: each has a folder of its own to fill,
        and the first one there wins.
        """
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            for parent in (self.folder.parent, self.folder.parent.parent):
                _sync(parent)
        work = self.folder / f".{self._place(step_count).name}.{uuid.uuid4().hex[:8]}.partial"
        work.mkdir()
        return work

    def complete(self, work: Path, state: CheckpointState) -> Path:
        """Make durable what was written, give it its name, and drop what is old. Where it lies. Raises OSError."""
        path = self._place(state.step_count)
        (work / STATE_FILE).write_text(json.dumps(asdict(state)))
        sync_tree(work)
        if _is_complete(path):
            shutil.rmtree(work)
        else:
            _remove(path)
            work.rename(path)
        _sync(self.folder)
        self._drop_old()
        return path

    def abandon(self, work: Path) -> None:
        """Free the room that an incomplete one takes."""
        _remove(work)

    def sweep(self) -> None:
        """Remove what a trainer left incomplete that is gone. One that was replaced and still writes has an OSError."""
        for partial in self.folder.glob(".step-*.partial"):
            _remove(partial)

    def validated(self, step_count: int, value: float) -> None:
        """Note how well the policy did after those steps, where there is a checkpoint of them. Raises OSError."""
        path = self.find(step_count)
        if path is None or _value(path) == value:
            return
        partial = path / f".{VALIDATION_FILE}"
        partial.write_text(json.dumps({"value": value}))
        _sync(partial)
        partial.replace(path / VALIDATION_FILE)
        self._drop_old()

    def _drop_old(self) -> None:
        complete = self._complete()
        newest = complete[-self._keep :]
        valued = [(value, _step(path), path) for path in complete if (value := _value(path)) is not None]
        best = [path for *_, path in sorted(valued, reverse=True)[: self._keep_best]]
        oldest = _step(newest[0])
        # What is younger and not complete may be another trainer's, who still writes it.
        partial = [path for path in self.folder.glob(".step-*") if _step(path) < oldest]
        for old in [path for path in complete if path not in newest and path not in best] + partial:
            _remove(old)

    def _complete(self) -> list[Path]:
        return sorted(filter(_is_complete, self.folder.glob("step-*")), key=_step)

    def _place(self, step_count: int) -> Path:
        return self.folder / f"step-{step_count:06d}"


def _read_state(path: Path) -> CheckpointState:
    tables = json.loads((path / STATE_FILE).read_text())
    if strange := tables.keys() - {each.name for each in fields(CheckpointState)}:
        raise ConfigError(
            f"{path}: {STATE_FILE} has {', '.join(sorted(strange))}, which this version does not know. Go on with the "
            "version that wrote it, or choose another run.name."
        )
    return CheckpointState(**tables)


def _is_complete(path: Path) -> bool:
    return (path / STATE_FILE).is_file()


def _value(path: Path) -> float | None:
    """How well the policy validated; None where it did not, or nobody noted it."""
    try:
        return float(json.loads((path / VALIDATION_FILE).read_text())["value"])
    except FileNotFoundError:
        return None


def _step(path: Path) -> int:
    return int(path.name.lstrip(".").removeprefix("step-").partition(".")[0])


def _remove(path: Path) -> None:
    """Remove the folder. From the first moment on it is incomplete, whatever happens meanwhile."""
    if not path.exists():
        return
    (path / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        log.warning("checkpoint not removed", path=str(path))


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Fill `path` anew: whole or not at all, but for the moment between two renames when it was there before."""
    work, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in (work, old):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        write(work)
        sync_tree(work)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if path.exists():
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Have everything in the folder on disk. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Have the file or folder on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
