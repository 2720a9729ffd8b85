"""Which rewards score which domain, and how their values become one. Pure: no socket, no clock, no process."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_gateway.config import RewardConfig, RewardGatewayConfig
from reward_gateway.rewards import INSTANT, REWARDS
from rollfarm.config import ConfigError, nearest
from rollfarm.errors import RewardFailed, UnknownDomain
from rollfarm.registry import check_settings, resolve
from rollfarm.reward import Reward, Score
from rollfarm.v1 import reward_gateway_pb2, trajectory_pb2


@dataclass(frozen=True)
class Here:
    """A reward that this process computes: instant, or async."""

    function: Reward
    """With its settings bound."""


@dataclass(frozen=True)
class InWorker:
    """A reward that a worker process computes."""

    reward: str
    """As the configuration names it."""

    settings: Mapping[str, Any]
    """As the configuration gives them; they were checked, and the worker reads them again."""


@dataclass(frozen=True)
class External:
    """A reward that another server computes."""

    address: str
    """host:port."""


@dataclass(frozen=True)
class Share:
    """One share of a domain's reward."""

    name: str
    """As the configuration names it."""

    weight: float
    """Of its value in the sum."""

    where: Here | InWorker | External
    """Who computes it."""


Plan = Mapping[str, Sequence[Share]]
"""The shares of every domain."""


def plan(config: RewardGatewayConfig) -> Plan:
    """Every domain's shares. Raises ConfigError for a reward that does not exist or a setting that it does not know."""
    return {
        domain: [_share(domain, reward, config) for reward in rewards.rewards]
        for domain, rewards in config.domains.items()
    }


def _share(domain: str, reward: RewardConfig, config: RewardGatewayConfig) -> Share:
    owner = f"reward_gateway.domains.{domain}: reward {reward.name!r}"
    external = config.external.get(reward.name)
    if external is not None:
        if reward.settings:
            raise ConfigError(f"{owner} is external and takes no settings here. Give them to its server.")
        return Share(reward.name, reward.weight, External(external.address))
    if ":" not in reward.name and reward.name not in REWARDS:
        known = [*REWARDS, *config.external]
        raise ConfigError(f"{owner} is unknown.{nearest(reward.name, known)} Your own is 'module:function'.")
    function = resolve(REWARDS, reward.name, what="reward")
    settings = check_settings(function, reward.settings, owner=owner)
    if reward.name in INSTANT or inspect.iscoroutinefunction(function):
        return Share(reward.name, reward.weight, Here(functools.partial(function, **settings)))
    return Share(reward.name, reward.weight, InWorker(reward.name, reward.settings))


def shares_of(plan: Plan, domain: str) -> Sequence[Share]:
    """The shares of `domain`. Raises UnknownDomain, which lists the known ones."""
    if domain not in plan:
        known = nearest(domain, list(plan)) if plan else " None is configured."
        raise UnknownDomain(f"No reward is configured for domain {domain!r}.{known}", domain=domain)
    return plan[domain]


def combine(shares: Sequence[Share], scores: Sequence[Score]) -> reward_gateway_pb2.ScoreResponse:
    """The weighted sum, with its parts. Raises RewardFailed when it overflows."""
    parts = [
        trajectory_pb2.RewardPart(name=share.name, value=score.value, weight=share.weight, detail=score.detail)
        for share, score in zip(shares, scores, strict=True)
    ]
    total = sum(part.weight * part.value for part in parts)
    if total - total != 0:  # infinite or not a number
        raise RewardFailed(f"The weighted sum of the rewards is {total}.", total=total)
    return reward_gateway_pb2.ScoreResponse(reward=total, parts=parts)
