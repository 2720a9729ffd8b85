"""Settings of the agents that play by themselves: the tables [env_manager.agents.DOMAIN]."""

from typing import Self

from pydantic import Field, model_validator

from rollfarm.config import Config


class AgentConfig(Config):
    """An agent that plays its domain's episodes by itself, through llm_proxy's HTTP: docs/agents.md."""

    command: list[str] = []
    """The program and its arguments, started anew for each episode in a new folder; a part that names a file where
    env_manager runs is given as its whole path. Empty is for an image that knows its own."""

    image: str = ""
    """Docker image that the agent runs in. Empty runs it as a process of env_manager's user, which is for agents that
    you trust."""

    seconds: float = Field(default=600.0, gt=0)
    """How long an episode may take. An agent that takes longer is killed, and scored as it is where the policy has
    acted."""

    output_bytes: int = Field(default=64 * 1024, ge=1)
    """What it prints is its answer; of more than this, the end."""

    environment: dict[str, str] = {}
    """Variables that it finds beside those of its session. Keys do not belong into a file: see `inherits`."""

    inherits: list[str] = []
    """Variables of env_manager's own environment that it finds as well, for example the key of a search engine."""

    network: str = "bridge"
    """Docker network of the image; llm_proxy.http.base_url has to be reachable from it. "host" is env_manager's own,
    where the whole farm is within reach; one made with `docker network create --internal` reaches this machine and
    nothing beyond."""

    memory_bytes: int = Field(default=0, ge=0)
    """Most memory of a container. 0 is without a limit."""

    @model_validator(mode="after")
    def _runs_something(self) -> Self:
        if not self.command and not self.image:
            raise ValueError("name a command, an image, or both.")
        return self
