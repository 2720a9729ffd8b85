"""How each environment fares: what its episodes came to, why the latest failed, and whether it is left alone."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import prometheus_client
import structlog

from env_manager.breakers import Breaker
from env_manager.config import EnvManagerConfig
from rollfarm.v1 import environment_pb2, trajectory_pb2

log = structlog.get_logger()

Outcome = trajectory_pb2.Outcome

SUSPENDED = prometheus_client.Gauge(
    "rollfarm_env_manager_environment_suspended", "1 while its breaker is open.", ["environment"]
)
ENDED = prometheus_client.Counter(
    "rollfarm_env_manager_environment_episodes_total",
    "Episodes that ended, by environment and outcome.",
    ["environment", "outcome"],
)


@dataclass(eq=False)
class Standing:
    """One environment's."""

    name: str
    breaker: Breaker
    running: int = 0
    """Episodes that are being played."""

    ended: "Counter[Outcome.ValueType]" = field(default_factory=Counter["Outcome.ValueType"])
    cause: str = ""
    """Of the latest failure."""

    def played(self, *, is_probe: bool) -> bool:
        """The environment played an episode to its end, whatever its score will be, and whenever. Whether it is
        suspended no more."""
        was_open = self.breaker.is_open
        if is_probe:
            self.breaker.probe_played()
        else:
            self.breaker.played(self.running)
        return self._changed(was_open)

    def count(self, outcome: "Outcome.ValueType", cause: str, now: float, *, is_probe: bool) -> bool:
        """An episode ended. Whether the environment is now suspended for it."""
        self.ended[outcome] += 1
        self.cause = cause or self.cause
        ENDED.labels(self.name, Outcome.Name(outcome)).inc()
        was_open = self.breaker.is_open
        if outcome == trajectory_pb2.OUTCOME_ENV_FAILED and is_probe:
            self.breaker.probe_failed(now)
        elif outcome == trajectory_pb2.OUTCOME_ENV_FAILED:
            self.breaker.failed(now, self.running)
        return self._changed(was_open)

    def _changed(self, was_open: bool) -> bool:
        if was_open == self.breaker.is_open:
            return False
        SUSPENDED.labels(self.name).set(self.breaker.is_open)
        if self.breaker.is_open:
            log.warning("environment suspended", environment=self.name, seconds=self.breaker.seconds, cause=self.cause)
        else:
            log.info("environment plays again", environment=self.name)
        return True

    def status(self) -> environment_pb2.EnvironmentStatus:
        return environment_pb2.EnvironmentStatus(
            name=self.name,
            running_count=self.running,
            ended_count_by_outcome={Outcome.Name(outcome): count for outcome, count in self.ended.items()},
            suspended=self.breaker.is_open,
            detail=self.cause,
        )


class Standings:
    """Every environment's that was ever asked for."""

    def __init__(self, config: EnvManagerConfig) -> None:
        self._config = config
        self._standings: dict[str, Standing] = {}

    def of(self, name: str) -> Standing:
        if name not in self._standings:
            self._standings[name] = self._new(name)
        return self._standings[name]

    def _new(self, name: str) -> Standing:
        config = self._config
        breaker = Breaker(
            most_failures=config.suspend_failures,
            share=config.suspend_share,
            first_seconds=config.suspend_seconds,
            most_seconds=config.most_suspend_seconds,
        )
        return Standing(name, breaker)

    @property
    def suspended(self) -> list[str]:
        """Environments of which nothing is asked for but their probes."""
        return sorted(name for name, standing in self._standings.items() if standing.breaker.is_open)

    def statuses(self, known: Iterable[str]) -> list[environment_pb2.EnvironmentStatus]:
        """Those that were asked for and those that are `known`, by name."""
        asked = {name: standing.status() for name, standing in self._standings.items()}
        others = {name: environment_pb2.EnvironmentStatus(name=name) for name in known if name not in asked}
        return [status for _, status in sorted((asked | others).items())]
