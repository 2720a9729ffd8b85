"""SwanLab, online or on this machine. SWANLAB_API_KEY and its other variables say where and who."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.sample_table import Sample
from trainer.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from swanlab import Run  # pyright: ignore[reportMissingImports]


class SwanLab:
    """Figures, and samples as text."""

    package: ClassVar[str] = "swanlab"

    _run: "Run"

    def __init__(
        self,
        *,
        project: str = "rollfarm",
        workspace: str | None = None,
        mode: Literal["online", "local", "offline"] | None = None,
    ) -> None:
        """`mode` local and offline keep the run in RUN/swanlab, where a run that is resumed has another one for each
        life of the trainer; unset leaves it to SWANLAB_MODE."""
        self._project = project
        self._workspace = workspace
        self._mode: Literal["online", "local", "offline"] | None = mode

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:

        import swanlab  # pyright: ignore[reportMissingImports]

        mode = self._mode or os.environ.get("SWANLAB_MODE", "online")
        online = {"id": run.tracking_id, "resume": "allow"} if mode == "online" else {}
        self._run = swanlab.init(
            project=self._project,
            workspace=self._workspace,
            name=run.tracking_id,
            mode=mode,
            log_dir=str(run.folder / "swanlab"),
            config=dict(config),
            **online,
        )

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        shown = [
            swanlab.Text(each.text, caption=f"{each.domain} {each.task}, reward {each.reward:g}") for each in samples
        ]
        self._run.log({"samples": shown}, step=step)

    def close(self) -> None:
        self._run.finish()
