"""What reward_gateway reads from the farm's file."""

from typing import Any

from pydantic import Field, field_validator

from rollfarm.config import Config, Listen, Root, Telemetry
from rollfarm.sandbox.config import SandboxConfig


class RewardConfig(Config):
    """One share of a domain's reward."""

    name: str
    """A built-in reward, a key of `external`, or "module:function" of your own."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The domain's reward is the sum of weight * value. Negative makes it a penalty."""

    clip: tuple[float, float] | None = None
    """[low, high]: the value is brought into these bounds before it is weighted. None leaves it."""

    timeout_seconds: float = Field(default=0.0, ge=0)
    """The longest that this reward may take. 0 is the gateway's own timeout_seconds."""

    settings: dict[str, Any] = {}
    """The function's keyword-only parameters; it refuses those that it does not know."""

    @field_validator("clip")
    @classmethod
    def _is_range(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] <= clip[1]:
            raise ValueError(f"its low bound {clip[0]:g} is above its high bound {clip[1]:g}")
        return clip


class DomainRewardsConfig(Config):
    """How one domain is scored."""

    rewards: list[RewardConfig] = Field(min_length=1)
    """At least one."""

    concurrency: int = Field(default=64, ge=1)
    """Episodes scored at once; more wait their turn. A domain that is slow holds up nobody but itself."""

    workers: int = Field(default=0, ge=0)
    """Its processes for rewards that block or may hang. 0 is the gateway's own `workers`."""


class ExternalConfig(Config):
    """A scorer that runs elsewhere and implements RewardService."""

    address: str
    """host:port."""

    compares: bool = False
    """Whether it compares the members of a group (ScoreGroup) instead of scoring each by itself (Score)."""


class RewardGatewayConfig(Config):
    """reward_gateway: which rewards score which domain."""

    listen: Listen = Listen(port=7704)
    """Where RewardGatewayService listens."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    domains: dict[str, DomainRewardsConfig] = {}
    """By the name of the domain; one that is missing cannot be scored."""

    external: dict[str, ExternalConfig] = {}
    """By the name that `rewards` use."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """The longest that one reward may take, and how long it may take before it has ever succeeded. A slower one fails,
    and the process that it hangs in is replaced."""

    least_timeout_seconds: float = Field(default=2.0, ge=0)
    """The shortest time that one reward is given, however fast it was lately."""

    timeout_factor: float = Field(default=1.5, ge=1, allow_inf_nan=False)
    """A reward is given this many times the longest time that it took lately, within the two bounds above."""

    timeout_window: int = Field(default=256, ge=1)
    """How many of a reward's latest successes are "lately"."""

    retries: int = Field(default=2, ge=0)
    """More attempts after a failure that may pass: a judge that cannot be read, an external scorer that is away or
    late. 0 fails at once."""

    workers: int = Field(default=1, ge=1)
    """Processes of each domain for rewards that block or may hang: maths, and your own functions that are not async.
    None are started for a domain that uses no such reward."""

    worker_megabytes: int = Field(default=4096, ge=0)
    """Address space of each of those processes; a reward that wants more fails. 0 is no limit."""

    sandbox: SandboxConfig = SandboxConfig()
    """What keeps the programs in that the reward `code` runs."""

    wait_seconds: float = Field(default=60.0, gt=0)
    """How long an episode may wait for its turn, and a reward for a worker. The score fails after that."""

    waiting: int = Field(default=4096, ge=0)
    """Episodes of one domain that may wait for their turn; one more fails at once. The caller's memory and this one's
    pay for it."""

    cached_scores: int = Field(default=10_000, ge=0)
    """Scores remembered, by the content of the episode, for rewards that are functions of it. 0 remembers none."""

    gather_seconds: float = Field(default=600.0, gt=0)
    """How long a member of a group waits for its siblings, and how long a group is kept after its latest member. The
    caller's own deadline, env_manager.score_seconds, may end the wait sooner."""

    gather_megabytes: int = Field(default=512, ge=1)
    """Episodes of groups that are kept; the group that has rested longest is forgotten first."""


class RewardGatewayRoot(Root):
    """The tables that reward_gateway reads."""

    reward_gateway: RewardGatewayConfig = RewardGatewayConfig()
    """This service."""

    def check(self) -> None:
        from reward_gateway.scoring import plan  # it imports this module

        plan(self.reward_gateway)
