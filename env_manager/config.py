"""What env_manager reads from the farm's file."""

from typing import Any

from pydantic import Field

from rollfarm.config import Config, Listen, Root, Telemetry
from rollfarm.run import ModelConfig


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

    model: ModelConfig = ModelConfig()
    """The policy's model: its tokenizer and its context are read here."""

    env_manager: EnvManagerConfig = EnvManagerConfig()
    """This service."""
