"""What a tracker is told, and the four verbs that it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trainer.sample_table import Sample


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run, as trackers know it."""

    name: str
    """run.name, for people."""

    tracking_id: str
    """The tracker's own id of the run: the same whenever the trainer goes on with it, another one when it is begun
    anew."""

    folder: Path
    """The run's folder; what a tracker keeps on this machine lies in it."""

    first_step: int
    """The first number of steps done that was not told before. 0 in a new run."""

    @property
    def goes_on(self) -> bool:
        """Whether an earlier life of the trainer has told of it already."""
        return self.first_step > 0


class Tracker(Protocol):
    """Somewhere that shows a run's figures. A new one is one file in trainer/trackers.

    The keyword-only parameters of the constructor are its settings. The constructor does nothing slow; everything else
    is called in one thread of the tracker's own, and may block or raise: training goes on.
    """

    package: ClassVar[str]
    """What has to be importable."""

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        """Open the run, or go on with it. `config` is the trainer's, as plain JSON with passwords masked. Where it
        raises, nothing more is called until the trainer starts again."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """What was measured once `step` steps were done, at `time` (seconds since 1970). Called in order of `step`;
        twice for one where a validation followed it."""
        ...

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        """Some trajectories of the batch that the last of `step` steps was trained on."""
        ...

    def close(self) -> None:
        """Send what is left. Called once, after `begin` succeeded."""
        ...
