"""What reward_gateway reads from the farm's file."""

from typing import Any

from pydantic import Field

from rollfarm.config import Config, Listen, Root, Telemetry


class RewardConfig(Config):
    """One share of a domain's reward."""

    name: str
    """A built-in reward, a key of `external`, or "module:function" of your own."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The domain's reward is the sum of weight * value. Negative makes it a penalty."""

    settings: dict[str, Any] = {}
    """The function's keyword-only parameters; it refuses those that it does not know."""


class DomainRewardsConfig(Config):
    """How one domain is scored."""

    rewards: list[RewardConfig] = Field(min_length=1)
    """At least one."""


class ExternalConfig(Config):
    """A scorer that runs elsewhere and implements RewardService."""

    address: str
    """host:port."""


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
    """How long one reward may take. A slower one fails, and the process that it hangs in is replaced."""

    workers: int = Field(default=1, ge=1)
    """Processes for rewards that block or may hang: maths, and your own functions that are not async. None are started
    when no domain uses such a reward."""


class RewardGatewayRoot(Root):
    """The tables that reward_gateway reads."""

    reward_gateway: RewardGatewayConfig = RewardGatewayConfig()
    """This service."""

    def check(self) -> None:
        from reward_gateway.scoring import plan  # it imports this module

        plan(self.reward_gateway)
