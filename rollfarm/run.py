"""The two tables that several services share: what the run is, and which model it trains."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from rollfarm import times
from rollfarm.config import Config, ConfigError
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]

RECIPE = "rollfarm_create.json"
"""In the folder of a model that [model.create] made: the settings that it was made from."""

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*")


class SamplingConfig(Config):
    """How the policy is sampled."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of one turn. The model's end-of-sequence token ends a turn early."""

    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature; the trainer takes the policy's log-probabilities at it too. 0 is greedy, for validation
    alone."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. 1 keeps every token; less is for validation alone."""

    top_k: int = Field(default=0, ge=0)
    """Tokens kept by rank. 0 keeps every token; more is for validation alone."""

    def to_proto(self) -> trajectory_pb2.Sampling:
        return trajectory_pb2.Sampling(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )


class DomainConfig(Config):
    """One source of tasks."""

    name: Name
    """Unique in the run. reward_gateway.domains.NAME says how it is scored."""

    environment: str
    """What plays its tasks: a built-in environment, or one of env_manager.servers."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the other domains."""

    settings: dict[str, Any] = {}
    """Settings of the environment; it refuses those that it does not know."""

    def to_proto(self) -> sample_buffer_pb2.Domain:
        return sample_buffer_pb2.Domain(
            name=self.name,
            environment=self.environment,
            weight=self.weight,
            settings_json=json.dumps(self.settings, sort_keys=True),
        )


class FilterConfig(Config):
    """One filter on complete groups."""

    name: str
    """zero_variance, difficulty, max_length, all_failed or pools; docs/configure.md says what each drops."""

    settings: dict[str, float] = {}
    """Its settings by name."""


class RunConfig(Config):
    """What the run is. It may not change once the run has begun, except `steps`."""

    name: Name = "run"
    """Names the run and its folder."""

    folder: Path = Path("runs")
    """The run's files lie in FOLDER/NAME: journal, checkpoints, metrics, report."""

    seed: int = 0
    """Group k of the run is a pure function of (seed, k)."""

    steps: int = Field(default=100, ge=0)
    """Training steps. 0 is without end."""

    alpha: float = Field(default=1.0, ge=0)
    """How many batches of work may run ahead of the trainer. At most floor((1 + alpha) * batch_groups) groups are
    outstanding, and a group lags at most ceil(alpha) versions at the take. 0 is exactly synchronous; gains end at about
    2."""

    batch_groups: int = Field(default=8, ge=1)
    """Groups in the batch of a step."""

    group_size: int = Field(default=16, ge=1)
    """Episodes of one task, whose rewards are compared."""

    redundant_members: int = Field(default=0, ge=0)
    """Extra episodes of each group; the first group_size win and the others are cancelled. 0 wastes nothing, and waits
    for the slowest."""

    redundant_groups: int = Field(default=0, ge=0)
    """Extra groups that are played beside those that alpha allows; the first batch_groups that are complete win. With
    alpha 0 the others are dropped at the take, with more they go on while fresh. 0 wastes nothing, and waits for the
    slowest."""

    domains: list[DomainConfig] = Field(default=[], validate_default=False)
    """Where tasks come from; at least one."""

    filters: list[FilterConfig] = []
    """Applied in order to each complete group; a dropped group is replaced by one of the current version."""

    sampling: SamplingConfig = SamplingConfig()
    """How training episodes sample."""

    validation_sampling: SamplingConfig | None = None
    """How validation episodes sample. Unset is like training."""

    lease_seconds: float = Field(default=30.0, gt=0)
    """An episode whose env_manager is silent for this long is leased again. Short leases recover faster from a dead
    env_manager, and cost heartbeats."""

    max_attempts: int = Field(default=5, ge=1)
    """Attempts at one episode before its group is dropped with the cause."""

    @field_validator("sampling")
    @classmethod
    def _trains(cls, sampling: SamplingConfig) -> SamplingConfig:
        if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                "training needs temperature above 0, top_p 1 and top_k 0: the trainer weighs a token by its "
                "probability under the whole policy. Sample otherwise in run.validation_sampling alone."
            )
        return sampling

    @field_validator("domains")
    @classmethod
    def _names_are_unique(cls, domains: list[DomainConfig]) -> list[DomainConfig]:
        names = [domain.name for domain in domains]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two are named {name!r}. Give each a name of its own.")
        return domains

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder / self.name

    def to_proto(self) -> sample_buffer_pb2.RunSpec:
        """The spec as sample_buffer takes it."""
        return sample_buffer_pb2.RunSpec(
            run_id=self.name,
            seed=self.seed,
            alpha=self.alpha,
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            redundant_members=self.redundant_members,
            redundant_groups=self.redundant_groups,
            step_count=self.steps,
            domains=[domain.to_proto() for domain in self.domains],
            filters=[sample_buffer_pb2.Filter(name=f.name, settings=f.settings) for f in self.filters],
            sampling=self.sampling.to_proto(),
            validation_sampling=(self.validation_sampling or self.sampling).to_proto(),
            lease_duration=times.duration(self.lease_seconds),
            max_attempts=self.max_attempts,
        )


class TinyModelConfig(Config):
    """A small decoder with random weights and a word-level tokenizer, made on the spot for demos and tests."""

    words: str
    """Every word that tasks and actions use, separated by spaces. Others become the unknown token."""

    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""

    layers: int = Field(default=2, ge=1)
    """Decoder layers."""

    heads: int = Field(default=2, ge=1)
    """Attention heads."""

    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of an attention head; vLLM on CPU knows 32 and some larger ones."""

    context_tokens: int = Field(default=512, ge=8)
    """Longest sequence."""

    seed: int = 0
    """Seeds the weights."""


class ModelConfig(Config):
    """The policy's model."""

    path: str = ""
    """A folder in Hugging Face format, where ~ is the home folder, or the name of a model on the hub."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What engines compute in. The trainer's passes are in bfloat16 where this is, and else in float32, as its master
    weights always are."""

    create: TinyModelConfig | None = None
    """Makes a tiny random model at `path` when nothing is there."""

    @field_validator("path")
    @classmethod
    def _at_home(cls, path: str) -> str:
        try:
            return str(Path(path).expanduser()) if path.startswith("~") else path
        except RuntimeError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def is_there(self) -> bool:
        """Whether a model lies in the folder `path`."""
        return (Path(self.path) / "config.json").is_file()

    @property
    def is_created(self) -> bool:
        """Whether [model.create] made the model, or is going to."""
        return self.create is not None and (not self.is_there or self._recipe.is_file())

    @property
    def is_outdated(self) -> bool:
        """Whether [model.create] made the model, from other settings than those of now."""
        if self.create is None or not self.is_there or not self._recipe.is_file():
            return False
        try:
            return TinyModelConfig.model_validate_json(self._recipe.read_text()) != self.create
        except ValidationError:
            return True

    def check(self) -> None:
        """Raise ConfigError unless a model lies at `path`, may be made there, or can be asked of the hub."""
        if not self.path:
            raise ConfigError("model.path: missing. Give a model's folder, or its name on the hub.")
        folder = Path(self.path)
        if self.is_there:
            return
        if folder.exists() and not (self.create and folder.is_dir() and not any(folder.iterdir())):
            raise ConfigError(
                f"model.path: {folder} is there and holds no model (no config.json). Give a folder that "
                "save_pretrained wrote, or an empty one with [model.create] to have a tiny model made there."
            )
        hub = _HUB_NAME.fullmatch(self.path)
        if self.create is None and (hub is None or Path(hub[1]).exists()):
            raise ConfigError(
                f"model.path: {folder} does not exist. Give a folder in Hugging Face format or an owner/name on the "
                "hub, or add [model.create] to make a tiny model there."
            )

    def refuse_outdated(self) -> None:
        """Raise ConfigError where the model was made from other settings: it is never used in silence."""
        if self.is_outdated:
            raise ConfigError(
                f"model.create: {self.path} was made with other settings. Have it made again by `rollfarm up` with "
                "--up.fresh true, which begins the run anew; or restore the settings, or choose another model.path."
            )

    @property
    def _recipe(self) -> Path:
        return Path(self.path) / RECIPE
