"""Settings of llm_proxy: the table [llm_proxy]."""

from pydantic import Field

from llm_proxy.front.config import HttpConfig
from llm_proxy.settings import RoutingSettings
from llm_proxy.tenants import TenantSettings
from rollfarm.config import Config, Listen, Root, Telemetry
from rollfarm.run import ModelConfig


class TenantConfig(Config):
    """What one tenant is granted: [llm_proxy.tenants.NAME]. A tenant without a table has these defaults."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the engines, relative to the other tenants that wait at the time."""

    most_running: int = Field(default=0, ge=0)
    """Slots that it may hold at once; more of its requests wait, and hold up nobody else. 0 is no limit."""

    most_open: int = Field(default=0, ge=0)
    """Requests that it may have open, waiting ones included; a further one is refused with QUOTA_EXCEEDED. 0 is no
    limit."""

    @property
    def settings(self) -> TenantSettings:
        """What routing needs of it."""
        return TenantSettings(self.weight, self.most_running, self.most_open)


class LlmProxyConfig(Config):
    """The front door to the engines."""

    listen: Listen = Listen(port=7701)
    """Where env_managers, the trainer and agents call."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    http: HttpConfig = HttpConfig()
    """The front door for agents."""

    engines: list[str] = ["127.0.0.1:7710"]
    """host:port of every engine host, names allowed, each of one host alone. More may be attached while it runs; those
    are forgotten when llm_proxy restarts."""

    oversubscription: float = Field(default=1.05, ge=1)
    """Requests given to an engine, as a multiple of its slots. Those beyond its slots lie ready there, so that a freed
    slot idles for no round trip: vLLM and SGLang take a twentieth, of others the engine host keeps them. 1 keeps every
    request that waits here, where order and choice stay open."""

    affinity_bound_tokens: int = Field(default=2048, ge=0)
    """A session stays with its engine, and its cached prefix, while that engine has at most this many more outstanding
    tokens than the least loaded one. 0 balances and ignores caches."""

    session_count: int = Field(default=100_000, ge=1)
    """Sessions whose engine is remembered: the latest ones, so many at least and twice as many at most. About 200 bytes
    each."""

    prefix_tokens: int = Field(default=256, ge=0)
    """A first turn prefers the engine that saw its prompt last, or else this many tokens of its beginning, as long as
    what the cache saves outweighs what that engine has to do more. 0 looks at whole prompts alone."""

    prefix_count: int = Field(default=100_000, ge=1)
    """Prompts and beginnings whose engine is remembered: the latest ones, so many at least and twice as many at most.
    About 200 bytes each."""

    prefill_token_share: float = Field(default=0.1, ge=0)
    """What a prompt token that has to be computed costs an engine, relative to a token that it generates: prompts are
    computed many tokens at a time. 0 ignores prompts."""

    tenants: dict[str, TenantConfig] = {}
    """Weights and quotas of tenants by name: who shares the engines while there is not enough for all."""

    version_wait_seconds: float = Field(default=300.0, ge=0)
    """How long a request may wait for a version that is not served yet, before it is refused with VERSION_NOT_SERVED.
    0 refuses at once."""

    suspend_failures: int = Field(default=5, ge=0)
    """Failures in a row, with no request finished in between, at which an engine is suspended. A lost connection counts
    once. 0 is never."""

    suspend_seconds: float = Field(default=5.0, gt=0)
    """How long a suspended engine gets nothing; then one request, as a probe. Doubles each time that a probe fails."""

    most_suspend_seconds: float = Field(default=300.0, gt=0)
    """Longest suspension."""

    stall_seconds: float = Field(default=600.0, ge=0)
    """An engine that has requests and brings no token of any of them for this long is suspended, and they move to
    engines that have nothing else to do. It must exceed the longest generation, where an engine answers whole
    generations instead of streaming. 0 is never."""

    stuck_seconds: float = Field(default=0.0, ge=0)
    """A single request that brings no token for this long is moved likewise: cancelled at its engine, continued from
    its tokens elsewhere. Only for engines that stream. 0 is never."""

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
    """How long an engine may take to put a version to use, with the gate closed while all wait for the slowest; also to
    fall asleep, and to wake."""

    drain_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long the running requests of engines that change together may take to finish in UPDATE_MODE_DRAIN, within the
    caller's deadline. It must exceed the longest generation: where one runs longer, the old weights go on, and the gate
    was closed in vain."""

    @property
    def routing(self) -> RoutingSettings:
        """What routing needs of it."""
        return RoutingSettings(
            oversubscription=self.oversubscription,
            affinity_bound_tokens=self.affinity_bound_tokens,
            session_count=self.session_count,
            prefix_tokens=self.prefix_tokens,
            prefix_count=self.prefix_count,
            prefill_token_share=self.prefill_token_share,
            max_fruitless_attempts=self.max_fruitless_attempts,
            version_wait_seconds=self.version_wait_seconds,
            stuck_seconds=self.stuck_seconds,
            stall_seconds=self.stall_seconds,
            suspend_failures=self.suspend_failures,
            suspend_seconds=self.suspend_seconds,
            most_suspend_seconds=self.most_suspend_seconds,
            tenants={name: tenant.settings for name, tenant in self.tenants.items()},
        )


class LlmProxyRoot(Root):
    """The tables that llm_proxy reads."""

    model: ModelConfig = ModelConfig()
    """The policy's model: its tokenizer is read for agents, where http is enabled."""

    llm_proxy: LlmProxyConfig = LlmProxyConfig()
    """This service."""

    def check(self) -> None:
        if self.llm_proxy.http.enabled:
            self.model.check()
