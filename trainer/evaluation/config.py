"""What an evaluation plays and counts."""

from typing import Annotated

from pydantic import Field

from rollfarm.config import Config, ConfigError


class EvaluationConfig(Config):
    """`rollfarm evaluate`: held-out tasks of each domain, played by the model at model.path, which is not trained."""

    tasks: int = Field(default=64, ge=1)
    """Tasks of each domain, whatever its weight. More than a data set holds out come again, and count as others: the
    intervals are then too narrow. A further evaluation of the run may ask for more."""

    samples: int = Field(default=8, ge=1)
    """Episodes of each task."""

    k: list[Annotated[int, Field(ge=1)]] = [1]
    """The k of each pass@k; none above `samples`."""

    metric: str = "reward"
    """What is averaged, and what an episode passes by: "reward", or a name that the environment measures."""

    threshold: float = 1.0
    """An episode passes whose metric is at least this."""

    def check(self) -> None:
        """Raise ConfigError where the keys do not agree."""
        if too_large := [k for k in self.k if k > self.samples]:
            raise ConfigError(
                f"trainer.evaluation.k: pass@{too_large[0]} cannot be estimated from {self.samples} samples of a task. "
                f"Raise trainer.evaluation.samples to {max(too_large)}."
            )
