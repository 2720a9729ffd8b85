"""What env_manager reads from the farm's file."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from env_manager.adapters import ADAPTERS, find
from env_manager.adapters.adapter import Adapter, package_missing
from env_manager.agent_config import AgentConfig
from env_manager.breakers import WINDOW
from env_manager.environments import ENVIRONMENTS
from env_manager.environments.solvable import Instant
from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry, nearest
from rollfarm.env import Environment
from rollfarm.registry import check_settings
from rollfarm.run import DomainConfig, ModelConfig, RunConfig
from rollfarm.sandbox.config import SandboxConfig
from rollfarm.secret import SOURCE, read_secret

MISSING_WORDS = 5
"""Most words that a message names."""


class EnvManagerConfig(Config):
    """env_manager: how many episodes it plays at once, with whom, and how long it waits for each."""

    listen: Listen = Listen(port=7720)
    """Where it serves its health."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    worker_id: str = ""
    """Names this worker in leases and trajectories. Empty makes a new name at every start."""

    slots: int = Field(default=128, ge=1)
    """Episodes played at once; those that are only being scored do not count. Beyond what engines decode at once, more
    slots only hide slow environments."""

    min_slots: int = Field(default=0, ge=0)
    """Fewest slots in use while the engines do not keep up: episodes begin as fast as generations get through llm_proxy
    without queueing, and no faster. Fewer, younger episodes then run at once, and the engines stay as busy. 0 always
    uses every slot."""

    queue_share: float = Field(default=0.5, gt=0)
    """With min_slots: generations that may queue, as a share of those that the engines make. It is what keeps engines
    busy between two requests of an episode; more only makes samples older."""

    sample_buffer_address: str = "127.0.0.1:7703"
    """host:port of sample_buffer."""

    llm_proxy_address: str = "127.0.0.1:7701"
    """host:port of llm_proxy."""

    reward_gateway_address: str = "127.0.0.1:7704"
    """host:port of reward_gateway."""

    servers: list[str] = []
    """host:port of environment servers; a name stands for every address that it resolves to. Those that play the same
    environment share its episodes."""

    attach_token: str = ""
    """What workers that dial in have to bring: "env:NAME" or "file:/path", where the token itself is kept. Empty lets
    in those on this machine alone."""

    processes: int = Field(default=2, ge=1)
    """Processes for each environment whose class says runs = "process". One that dies fails the episodes that it plays;
    each takes about 60 MB."""

    sandbox: SandboxConfig = SandboxConfig()
    """What keeps the programs in that the environment `coding` runs."""

    environments: list[str] = []
    """Environments to ask for. Empty asks for any, and fails the episodes of those that nobody here plays; name them
    where workers differ."""

    max_observation_chars: int = Field(default=1_000_000, ge=0)
    """Most characters that an environment may show at once. One that shows more fails its episode, which is leased
    again. 0 is without limit."""

    environment_seconds: float = Field(default=60.0, gt=0)
    """How long an environment may take to answer once. A slower one fails its episode, which is leased again."""

    suspend_failures: int = Field(default=16, ge=0, le=WINDOW)
    """An environment that fails this many of its latest 32 episodes is left alone for a while, if they are
    suspend_share of them. Where it plays more at once, as many are looked back upon. Others play on; then one episode
    at a time tries whether it is well again. 0 is never."""

    suspend_share: float = Field(default=0.75, gt=0, le=1)
    """Share of its latest episodes that an environment has to fail to be left alone. An environment that fails less
    costs its failed episodes, which are leased again."""

    suspend_seconds: float = Field(default=5.0, ge=0)
    """How long an environment is left alone first. Twice as long after each trial that fails."""

    most_suspend_seconds: float = Field(default=60.0, ge=0)
    """Longest time between two trials."""

    turn_seconds: float = Field(default=300.0, gt=0)
    """How long one generation may take, waiting included. A slower one aborts its episode, which is leased again: set
    it above the longest outage of llm_proxy or the engines that a run shall ride out."""

    episode_seconds: float = Field(default=3600.0, gt=0)
    """How long an episode may take. A longer one is cut short and scored as it is."""

    score_seconds: float = Field(default=120.0, gt=0)
    """How long scoring may take, reward_gateway's restarts included."""

    max_turns: int = Field(default=0, ge=0)
    """Most actions of an episode; one that wants more is cut short and scored as it is. 0 leaves it to the
    environment."""

    context_tokens: int = Field(default=0, ge=0)
    """Most tokens of an episode, or of each of its segments; one that needs more is cut short and scored as it is. 0
    is the model's max_position_embeddings."""

    template: dict[str, Any] = {}
    """Variables for the model's chat template, for example {enable_thinking = false}."""

    rewriting: Literal["segment", "append"] = "segment"
    """Where the model's chat template renders otherwise what was said before, as Qwen3's strips earlier thoughts:
    "segment" shows the policy what the template renders, as at deployment, and trains each such stretch by itself, at
    the price of every prompt anew; "append" goes on from the tokens so far."""

    agents: dict[str, AgentConfig] = {}
    """By domain, the agent that plays its episodes by itself; llm_proxy.http has to be enabled. Domains without one are
    played turn by turn."""

    @model_validator(mode="after")
    def _has_its_fewest_slots(self) -> "EnvManagerConfig":
        if self.min_slots > self.slots:
            raise ValueError(f"min_slots is {self.min_slots}, and there are {self.slots} slots.")
        return self

    @field_validator("attach_token")
    @classmethod
    def _token_lies_elsewhere(cls, source: str) -> str:
        if source and not SOURCE.fullmatch(source):
            raise ValueError("a token is not kept in files. Write env:NAME or file:/path, where it lies.")
        return source

    def read_token(self) -> str:
        """What workers that dial in have to bring. Raises ConfigError."""
        return read_secret("env_manager.attach_token", self.attach_token) if self.attach_token else ""


class EnvManagerRoot(Root):
    """The tables that env_manager reads."""

    run: RunConfig = RunConfig()
    """Its domains' environments and settings are checked here; each task brings its own."""

    model: ModelConfig = ModelConfig()
    """The policy's model: its tokenizer and its context are read here."""

    env_manager: EnvManagerConfig = EnvManagerConfig()
    """This service."""

    def check(self) -> None:
        self.model.check()
        domains = [domain.name for domain in self.run.domains]
        for name in self.env_manager.agents:
            if domains and name not in domains:
                raise ConfigError(f"env_manager.agents: {name!r} is no domain of the run.{nearest(name, domains)}")
        for domain in self.run.domains:
            if domain.environment in (*ENVIRONMENTS, *ADAPTERS) or ":" in domain.environment or not self._is_open:
                self._check_domain(domain)

    @property
    def _is_open(self) -> bool:
        """Whether others may play what is not known here."""
        return bool(self.env_manager.servers or self.env_manager.attach_token or self.env_manager.environments)

    def _check_domain(self, domain: DomainConfig) -> None:
        """Check what is not a server's to know."""
        owner = f"run.domains: {domain.name!r}"
        try:
            kind = find(ENVIRONMENTS, domain.environment)
            if not (isinstance(kind, type) and issubclass(kind, Environment)):
                raise ConfigError(f"{domain.environment!r} is not a subclass of rollfarm.env.Environment.")
            settings = check_settings(kind, domain.settings, owner=domain.environment)
            if issubclass(kind, Adapter) and not kind.is_installed() and not self._is_open:
                raise ConfigError(str(package_missing(kind)))
            if issubclass(kind, Adapter) and not self._is_open:
                kind.check(settings)
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error}") from None
        if issubclass(kind, Instant) and self.model.create is not None and self.model.is_created:
            known = set(self.model.create.words.split())
            missing = list(islice(_unknown(kind(**settings).words(), known), MISSING_WORDS + 1))
            if missing:
                named = ", ".join(missing[:MISSING_WORDS]) + (" and more" if missing[MISSING_WORDS:] else "")
                raise ConfigError(
                    f"model.create.words: {named} missing, which {domain.environment} shows or takes. Add them: an "
                    "unknown word becomes <unk>, and cannot be told from another."
                )


def _unknown(words: Iterable[str], known: set[str]) -> Iterator[str]:
    """The words that are not known, each once."""
    told = set(known)
    for word in words:
        if word not in told:
            told.add(word)
            yield word
