"""Settings of llm_proxy: the table [llm_proxy]."""

from pydantic import Field

from llm_proxy.routing import RoutingSettings
from rollfarm.config import Config, Listen, Root, Telemetry


class LlmProxyConfig(Config):
    """The front door to the engines."""

    listen: Listen = Listen(port=7701)
    """Where env_managers, the trainer and agents call."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    engines: list[str] = ["127.0.0.1:7710"]
    """host:port of every engine host, names allowed. More may be attached while it runs; those are forgotten when
    llm_proxy restarts."""

    oversubscription: float = Field(default=1.0, ge=1)
    """Requests given to an engine, as a multiple of its slots. 1 keeps the queue here, where order and choice stay
    open; more hides the round trip from very fast engines."""

    affinity_bound_tokens: int = Field(default=2048, ge=0)
    """A session stays with its engine, and its cached prefix, while that engine has at most this many more outstanding
    tokens than the least loaded one. 0 balances and ignores caches."""

    session_count: int = Field(default=100_000, ge=1)
    """Sessions whose engine is remembered, the latest ones. About 200 bytes each."""

    max_fruitless_attempts: int = Field(default=8, ge=0)
    """Engines in a row that may fail a request without adding a token before the request is refused. 0 refuses at the
    first failure."""

    health_seconds: float = Field(default=0.5, gt=0)
    """How often each engine is asked for its status."""

    health_timeout_seconds: float = Field(default=5.0, gt=0)
    """An engine that does not answer for this long is given up, and its requests continue elsewhere."""

    reconnect_seconds: float = Field(default=1.0, gt=0)
    """Longest pause between attempts to reach an engine."""

    join_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long an engine may take to join a process group for weights."""

    stage_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long an engine may take to receive a version, within the caller's deadline."""

    apply_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long an engine may take to put a version to use. The gate is closed meanwhile: all wait for the slowest."""

    drain_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long running requests may take to finish in UPDATE_MODE_DRAIN, within the caller's deadline."""

    @property
    def routing(self) -> RoutingSettings:
        """What routing needs of it."""
        return RoutingSettings(
            oversubscription=self.oversubscription,
            affinity_bound_tokens=self.affinity_bound_tokens,
            session_count=self.session_count,
            max_fruitless_attempts=self.max_fruitless_attempts,
        )


class LlmProxyRoot(Root):
    """The tables that llm_proxy reads."""

    llm_proxy: LlmProxyConfig = LlmProxyConfig()
    """This service."""
