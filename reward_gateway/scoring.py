"""Which rewards score which domain, and how their values become one. Pure: no socket, no clock, no process."""

import functools
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_gateway.config import RewardConfig, RewardGatewayConfig
from reward_gateway.rewards import INSTANT, PACKAGES, REWARDS, RUN_PROGRAMS
from rollfarm.config import ConfigError, nearest
from rollfarm.errors import RewardFailed, UnknownDomain
from rollfarm.registry import check_settings, resolve
from rollfarm.reward import Reward, Score, is_comparison, is_pure
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

    clip: tuple[float, float] | None = None
    """Bounds of its value before it is weighted."""

    compares: bool = False
    """Whether it scores the members of a group beside each other."""

    remembered: Mapping[str, Any] | None = None
    """Its settings, where its scores may be remembered: it takes time, and is a function of the episode."""

    timeout_seconds: float = 0.0
    """The longest that it may take; 0 is the gateway's."""

    runs_programs: bool = False
    """Whether it runs what the policy wrote, in the sandbox, and bounds the time of that itself."""


Plan = Mapping[str, Sequence[Share]]
"""The shares of every domain."""


def plan(config: RewardGatewayConfig) -> Plan:
    """Every domain's shares.

    Raises ConfigError for a reward that does not exist or whose package is missing, and for a setting that it does not
    know.
    """
    return {
        domain: [_share(domain, reward, config) for reward in rewards.rewards]
        for domain, rewards in config.domains.items()
    }


def _share(domain: str, reward: RewardConfig, config: RewardGatewayConfig) -> Share:
    owner = f"reward_gateway.domains.{domain}: reward {reward.name!r}"
    share = functools.partial(
        Share, reward.name, reward.weight, clip=reward.clip, timeout_seconds=reward.timeout_seconds
    )
    external = config.external.get(reward.name)
    if external is not None:
        if reward.settings:
            raise ConfigError(f"{owner} is external and takes no settings here. Give them to its server.")
        return share(External(external.address), compares=external.compares)
    if ":" not in reward.name and reward.name not in REWARDS:
        known = [*REWARDS, *config.external]
        raise ConfigError(f"{owner} is unknown.{nearest(reward.name, known)} Your own is 'module:function'.")
    function = resolve(REWARDS, reward.name, what="reward")
    settings = check_settings(function, reward.settings, owner=owner)
    _check_packages(owner, reward.name)
    compares = is_comparison(function)
    if reward.name in INSTANT:
        return share(Here(functools.partial(function, **settings)), compares=compares)
    remembered = reward.settings if is_pure(function) and not compares else None
    if inspect.iscoroutinefunction(function):
        here = Here(functools.partial(function, **settings))
        return share(here, compares=compares, remembered=remembered, runs_programs=reward.name in RUN_PROGRAMS)
    return share(InWorker(reward.name, reward.settings), compares=compares, remembered=remembered)


def _check_packages(owner: str, reward: str) -> None:
    for package, install in PACKAGES.get(reward, {}).items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{owner} needs the package {package}, which is not installed: {install}.")


def shares_of(plan: Plan, domain: str) -> Sequence[Share]:
    """The shares of `domain`. Raises UnknownDomain, which lists the known ones."""
    if domain not in plan:
        known = nearest(domain, list(plan)) if plan else " None is configured."
        raise UnknownDomain(f"No reward is configured for domain {domain!r}.{known}", domain=domain)
    return plan[domain]


def combine(shares: Sequence[Share], scores: Sequence[Score]) -> reward_gateway_pb2.ScoreResponse:
    """The weighted sum, with its parts. Raises RewardFailed when it overflows."""
    parts = [
        trajectory_pb2.RewardPart(
            name=share.name, value=_clipped(share, score.value), weight=share.weight, detail=score.detail
        )
        for share, score in zip(shares, scores, strict=True)
    ]
    total = sum(part.weight * part.value for part in parts)
    if total - total != 0:  # infinite or not a number
        raise RewardFailed(f"The weighted sum of the rewards is {total}.", total=total)
    return reward_gateway_pb2.ScoreResponse(reward=total, parts=parts)


def _clipped(share: Share, value: float) -> float:
    if share.clip is None:
        return value
    low, high = share.clip
    return min(max(value, low), high)
