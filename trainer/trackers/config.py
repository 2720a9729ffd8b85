"""Which trackers are told, and of what."""

from importlib.util import find_spec
from typing import Any

from pydantic import Field

from rollfarm.config import Config, ConfigError
from rollfarm.registry import check_settings, resolve
from trainer.trackers import TRACKERS
from trainer.trackers.tracker import Tracker


class TrackerConfig(Config):
    """One place that shows the run's figures. Keys and passwords are those of its library's environment variables."""

    name: str
    """tensorboard, wandb, swanlab, trackio or mlflow, or "module:Class" of your own."""

    settings: dict[str, Any] = {}
    """The keyword parameters of its class; it refuses those that it does not know."""


class SamplesConfig(Config):
    """Trajectories shown as text, in samples.jsonl and by trackers that have tables."""

    every: int = Field(default=10, ge=0)
    """Steps between two tables; the first step has one. 0 writes none."""

    count: int = Field(default=4, ge=1)
    """Trajectories of a table, the domains in turn. The trainer decodes them after the step, a millisecond for each
    thousand tokens or so."""


def check(trackers: list[TrackerConfig]) -> None:
    """Raise ConfigError for a name or a setting that is wrong, and for a library that is missing."""
    names = [tracker.name for tracker in trackers]
    for number, tracker in enumerate(trackers):
        where = f"trainer.trackers[{number}]"
        if names.count(tracker.name) > 1:
            raise ConfigError(f"{where}: two are named {tracker.name!r}. Name each once.")
        try:
            kind = resolve(TRACKERS, tracker.name, what="tracker")
            check_settings(kind, tracker.settings, owner=tracker.name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if find_spec(kind.package) is None:
            raise ConfigError(
                f"{where}: {tracker.name} needs the package {kind.package}. "
                f"Install it with `pip install 'rollfarm[{tracker.name}]'`, or take the tracker out."
            )


def build(tracker: TrackerConfig) -> Tracker:
    """The tracker with its settings. Raises ConfigError as `check` does."""
    kind = resolve(TRACKERS, tracker.name, what="tracker")
    return kind(**check_settings(kind, tracker.settings, owner=tracker.name))
