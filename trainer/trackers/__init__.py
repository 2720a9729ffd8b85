"""Where else the run's figures go: a literal dict from name to class.

metrics.jsonl and samples.jsonl are always written, and are the truth after a crash."""

from trainer.trackers.mlflow_runs import MLflow
from trainer.trackers.swanlab_runs import SwanLab
from trainer.trackers.tensorboard_files import TensorBoard
from trainer.trackers.tracker import Tracker
from trainer.trackers.trackio_runs import Trackio
from trainer.trackers.wandb_runs import Wandb

TRACKERS: dict[str, type[Tracker]] = {
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}
