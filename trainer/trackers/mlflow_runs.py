"""MLflow, at any tracking server. MLFLOW_TRACKING_USERNAME and its other variables say who."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.sample_table import Sample
from trainer.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "rollfarm.tracking_id"
"""Finds the run again: MLflow mints ids of its own."""


class MLflow:
    """Figures, and samples as JSON artifacts."""

    package: ClassVar[str] = "mlflow"

    _client: "MlflowClient"
    _run_id: str

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "rollfarm") -> None:
        """`tracking_uri` is where the server is; unset leaves it to MLFLOW_TRACKING_URI."""
        self._uri = tracking_uri
        self._experiment = experiment

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client = client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        known = client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.tracking_id}'", max_results=1)
        if known:
            self._run_id = known[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        made = client.create_run(experiment_id, tags={TAG: run.tracking_id}, run_name=run.name)
        self._run_id = made.info.run_id
        client.log_dict(self._run_id, dict(config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        at = int(time * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, at, step) for name, value in metrics.items()])

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        rows = [asdict(sample) for sample in samples]
        self._client.log_text(self._run_id, json.dumps(rows, indent=2), f"samples/{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
