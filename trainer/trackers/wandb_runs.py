"""Weights & Biases, online or offline. WANDB_API_KEY, WANDB_BASE_URL and its other variables say where and who."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.sample_table import Sample, as_row
from trainer.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from wandb import Run

STEPS = "steps_done"
"""What every chart has on its axis."""

ROWS = 3
"""W&B's rows for each number of steps: the step's, its samples', and a validation's. Rows are numbered by them, and not
from 0 in each life of the trainer, so that `wandb sync` never takes one for another."""


class Wandb:
    """Figures, and samples as tables."""

    package: ClassVar[str] = "wandb"

    _run: "Run"

    def __init__(
        self,
        *,
        project: str = "rollfarm",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        """`mode` offline keeps the run in RUN/wandb, for `wandb sync`; unset leaves it to WANDB_MODE."""
        self._project = project
        self._entity = entity
        self._group = group
        self._tags = tags
        self._mode: Literal["online", "offline"] | None = mode

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=list(self._tags),
            mode=self._mode,
            name=run.name,
            id=run.tracking_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric(STEPS, hidden=True)
        self._run.define_metric("*", step_metric=STEPS)
        self._next_row = self._run.step

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._add(step, {"_timestamp": time, **metrics})

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        import wandb

        rows = [as_row(sample) for sample in samples]
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._add(step, {"_timestamp": time, "samples": table})

    def _add(self, step: int, row: Mapping[str, object]) -> None:
        number = max(ROWS * step, self._next_row)
        self._run.log({STEPS: step, **row}, step=number)
        self._next_row = number + 1

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # Its own process has not written all of it before it ends.
