"""Who else plays environments: servers that are dialled, workers that dialled in, and processes of env_manager's own.

An episode goes to the host that plays the fewest, among those that are well and have room. It stays there: a host that
is lost fails the episodes that it played, and no others.
"""

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from rollfarm.service import Changed
from rollfarm.v1 import environment_pb2
from rollfarm.v1.environment_pb2 import EnvironmentHost

REST_SECONDS = 5.0
"""How long other hosts are preferred to one that failed."""

Request = (
    environment_pb2.ResetRequest
    | environment_pb2.StepRequest
    | environment_pb2.EnvironmentServiceScoreRequest
    | environment_pb2.CloseRequest
)


class Host(ABC):
    """One of them, with what it plays and how it fares."""

    kind: ClassVar["EnvironmentHost.Kind.ValueType"]
    """How it is reached."""

    def __init__(self, address: str, changed: Changed) -> None:
        """`changed` is notified when it may have become free or well."""
        self.address = address
        self.environments: frozenset[str] = frozenset()
        self.max_sessions = 0
        self.open_count = 0
        self.is_healthy = False
        self.is_described = False
        self.changed = changed
        self._failed_at = float("-inf")

    @abstractmethod
    async def ask(self, request: Request, seconds: float) -> Any:
        """The answer that belongs to the request. Raises EnvironmentFailed, whose cause is what the host raised."""

    @abstractmethod
    def leave(self, why: str) -> None:
        """From now on it gets no new episode, and is not waited for."""

    @property
    def has_room(self) -> bool:
        return not 0 < self.max_sessions <= self.open_count

    @property
    def load(self) -> tuple[bool, int]:
        """The smaller, the better: whether it failed just now, then its episodes."""
        return time.monotonic() - self._failed_at < REST_SECONDS, self.open_count

    def described(self, description: environment_pb2.DescribeResponse) -> None:
        """It is well, and plays this."""
        self.environments = frozenset(info.name for info in description.environments)
        self.max_sessions = description.max_sessions
        self.is_described = self.is_healthy = True
        self.changed.notify()

    def failed(self) -> None:
        """It did not answer a call."""
        self._failed_at = time.monotonic()

    def free(self) -> None:
        """An episode ended there."""
        self.open_count -= 1
        self.changed.notify()

    def status(self) -> EnvironmentHost:
        return EnvironmentHost(
            address=self.address,
            kind=self.kind,
            healthy=self.is_healthy,
            environments=sorted(self.environments),
            running_count=self.open_count,
        )


class Hosts:
    """Every host, as they come and go."""

    def __init__(self) -> None:
        self._hosts: dict[Host, None] = {}
        self.awaited: set[str] = set()
        """Whatever may bring more hosts: names that are not resolved yet, and workers that may dial in."""
        self.changed = Changed()
        """Notified when a host may have become free or well."""

    def add(self, host: Host) -> None:
        self._hosts[host] = None
        self.changed.notify()

    def remove(self, host: Host) -> None:
        self._hosts.pop(host, None)
        self.changed.notify()

    def release(self, why: str) -> None:
        """Let the workers that dialled in go, who would keep their streams open."""
        for host in [host for host in self._hosts if host.kind == EnvironmentHost.KIND_ATTACHED]:
            host.leave(why)

    @property
    def environments(self) -> set[str]:
        """What is played somewhere, well or not."""
        return set[str]().union(*(host.environments for host in self._hosts))

    @property
    def are_known(self) -> bool:
        """Whether every host is here and has said what it plays."""
        return not self.awaited and all(host.is_described for host in self._hosts)

    def playing(self, name: str, *, process: bool = False) -> list[Host]:
        """Those that play it and are well, the least loaded first: env_manager's own processes, or all others."""
        found = [
            host
            for host in self._hosts
            if name in host.environments and host.is_healthy and process == (host.kind == EnvironmentHost.KIND_PROCESS)
        ]
        return sorted(found, key=lambda host: host.load)

    def hosts(self) -> list[EnvironmentHost]:
        """Each as GetStatus shows it."""
        return [host.status() for host in self._hosts]
