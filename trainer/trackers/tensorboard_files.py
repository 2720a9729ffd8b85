"""TensorBoard: event files in RUN/tensorboard. Look at them with `tensorboard --logdir RUN/tensorboard`."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.sample_table import Sample
from trainer.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """Scalars, and samples as text."""

    package: ClassVar[str] = "tensorboard"

    _writer: "SummaryWriter"

    def __init__(self, *, flush_seconds: int = 30) -> None:
        """`flush_seconds` is how long a figure may stay in memory; a crash loses it here."""
        self._flush_seconds = flush_seconds

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # What an earlier life wrote after it last said how far it was is written again: readers hide the first one.
        purge = run.first_step + 1 if run.goes_on else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge, flush_secs=self._flush_seconds)
        if not run.goes_on:
            self._writer.add_text("config", _code(json.dumps(config, indent=2)), 0)

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        parts = [
            f"**{sample.domain}** task {sample.task}, reward {sample.reward:g}, {sample.outcome}, version "
            f"{sample.policy_version}\n\n{_code(sample.text)}"
            for sample in samples
        ]
        self._writer.add_text("samples", "\n\n".join(parts), step, walltime=time)

    def close(self) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """As Markdown that shows it as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
