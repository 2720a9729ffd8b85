"""What is trained on records, and how."""

from typing import Literal

from pydantic import Field

from rollfarm.config import Config, ConfigError
from rollfarm.records import Source, check_available

PIPELINES = ("sft", "dpo", "distillation")


class RecordsConfig(Config):
    """A data set of records."""

    source: str
    """A file that ends in .jsonl or .parquet, or the name of a data set on the hub."""

    subset: str = ""
    """Of a data set on the hub, its configuration."""

    split: str = "train"
    """Of a data set on the hub."""

    weight: float = Field(default=1.0, gt=0)
    """How often each of its records comes in an epoch, on average: 2 is twice, 0.5 is every second one."""

    def to_source(self) -> Source:
        return Source(self.source, self.subset, self.split)


class OfflineConfig(Config):
    """`rollfarm train`: training on records in place of a farm's episodes."""

    pipeline: Literal["sft", "dpo", "distillation"] = "sft"
    """What is learnt: "sft" imitates the answers; "dpo" prefers one answer to another (Rafailov et al. 2023), near
    trainer.kl.reference; "distillation" imitates trainer.teacher's probabilities of every word (Hinton et al. 2015)."""

    records: list[RecordsConfig] = Field(default=[], validate_default=False)
    """Data sets, mixed by their weights; at least one."""

    epochs: int = Field(default=0, ge=0)
    """Times to go through the records; the last batch is filled up with the next epoch's, and run.steps is not read.
    0 trains for run.steps steps."""

    batch_size: int = Field(default=16, ge=1)
    """Records of one step. A pair of answers is one."""

    max_tokens: int = Field(default=0, ge=0)
    """A record with more tokens is left out of its batch and counted: nothing is ever cut. 0 is the model's context."""

    shuffle: bool = True
    """Each epoch has an order of its own, by trainer.seed. False takes records as they come."""

    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of each data set that is never trained on: the policy is measured on it before the first step, after the
    last and every trainer.validation_every steps. 0 measures nothing."""

    beta: float = Field(default=0.1, gt=0)
    """Of "dpo": how dear it is to leave the reference. Smaller goes farther."""

    def check(self) -> None:
        """Raise ConfigError where a file or a library is missing. Reads and downloads no records."""
        if not self.records:
            raise ConfigError("trainer.offline.records: empty. Add [[trainer.offline.records]] with a source.")
        for index, each in enumerate(self.records):
            try:
                check_available(each.to_source())
            except ConfigError as error:
                raise ConfigError(f"trainer.offline.records.{index}: {error}") from None
