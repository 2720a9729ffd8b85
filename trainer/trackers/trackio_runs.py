"""Trackio, on this machine or in a Space. TRACKIO_DIR and its other variables say where, HF_TOKEN who."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.sample_table import Sample, as_row
from trainer.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from trackio import Run  # pyright: ignore[reportMissingImports]


class Trackio:
    """Figures, and samples as tables."""

    package: ClassVar[str] = "trackio"

    _run: "Run"

    def __init__(self, *, project: str = "rollfarm", space_id: str | None = None) -> None:
        """`space_id` is a Space on the hub, such as "me/runs"; unset keeps the run on this machine."""
        self._project = project
        self._space_id = space_id

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # A run goes by its name there.
        self._run = trackio.init(
            project=self._project,
            name=run.tracking_id,
            space_id=self._space_id,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run.log({"samples": trackio.Table(data=[as_row(sample) for sample in samples])}, step=step)

    def close(self) -> None:
        self._run.finish()
