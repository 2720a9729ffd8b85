"""What env_manager reads from the farm's file."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pydantic import Field

from env_manager.environments import ENVIRONMENTS
from env_manager.environments.solvable import Solvable
from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry
from rollfarm.env import Environment
from rollfarm.registry import check_settings, resolve
from rollfarm.run import DomainConfig, ModelConfig, RunConfig

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
    """Episodes played at once. Beyond what engines decode at once, more slots only hide slow environments."""

    sample_buffer_address: str = "127.0.0.1:7703"
    """host:port of sample_buffer."""

    llm_proxy_address: str = "127.0.0.1:7701"
    """host:port of llm_proxy."""

    reward_gateway_address: str = "127.0.0.1:7704"
    """host:port of reward_gateway."""

    servers: list[str] = []
    """host:port of each environment server. Two that play the same environment share its episodes."""

    environments: list[str] = []
    """Environments to ask for. Empty asks for any, and fails the episodes of those that nobody here plays; name them
    where workers differ."""

    environment_seconds: float = Field(default=60.0, gt=0)
    """How long an environment may take to answer once. A slower one fails its episode, which is leased again."""

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
    """Most tokens of an episode; one that needs more is cut short and scored as it is. 0 is the model's
    max_position_embeddings."""

    template: dict[str, Any] = {}
    """Variables for the model's chat template, for example {enable_thinking = false}."""


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
        for domain in self.run.domains:
            if domain.environment in ENVIRONMENTS or ":" in domain.environment or not self.env_manager.servers:
                self._check_domain(domain)

    def _check_domain(self, domain: DomainConfig) -> None:
        """Check what is not a server's to know."""
        owner = f"run.domains: {domain.name!r}"
        try:
            kind = resolve(ENVIRONMENTS, domain.environment, what="environment")
            if not (isinstance(kind, type) and issubclass(kind, Environment)):
                raise ConfigError(f"{domain.environment!r} is not a subclass of rollfarm.env.Environment.")
            settings = check_settings(kind, domain.settings, owner=domain.environment)
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error}") from None
        if issubclass(kind, Solvable) and self.model.create is not None and self.model.is_created:
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
