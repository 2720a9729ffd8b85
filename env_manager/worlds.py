"""Where environments are found: built in, a class of the user's own, or on a host of any kind.

Whatever an environment does wrong becomes a FarmError that says which one and how; nothing else is disturbed.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from env_manager.adapters import ADAPTERS, find, is_installed
from env_manager.environments import ENVIRONMENTS
from env_manager.hosts import Host, Hosts
from env_manager.processes import Processes
from env_manager.remote import RemoteWorld
from rollfarm.config import ConfigError
from rollfarm.env import Action, Environment, Kind, Observation, Step
from rollfarm.env_server import unknown_environment
from rollfarm.errors import EnvironmentFailed, FarmError, UnknownEnvironment
from rollfarm.playing import Play, read_settings
from rollfarm.reward import Turn
from rollfarm.v1 import trajectory_pb2

log = structlog.get_logger()


class World(Protocol):
    """One episode's environment, wherever it is."""

    environment_id: str
    """The process that answers."""

    async def reset(self) -> Observation: ...

    async def step(self, action: Action) -> Step: ...

    async def score(self, turns: Sequence[Turn], answer: str) -> Step:
        """Judge an episode that an agent played by itself; no step follows. Of the Step, reward and metrics count."""
        ...

    async def close(self) -> None: ...


class Worlds:
    """Every environment that this worker can play."""

    def __init__(
        self,
        hosts: Hosts,
        processes: Processes,
        *,
        environment_seconds: float = 60.0,
        environment_id: str = "",
        most_chars: int = 0,
        built_in: Mapping[str, Kind] = ENVIRONMENTS,
    ) -> None:
        """`environment_id` names the ones that run in this process; `most_chars` bounds what one shows at once."""
        self._hosts = hosts
        self._processes = processes
        self._seconds = environment_seconds
        self._environment_id = environment_id
        self._most_chars = most_chars
        self._built_in = built_in

    @property
    def known(self) -> list[str]:
        """The names that can be played now."""
        return sorted(self._hosts.environments.union(self._built_in, ADAPTERS))

    @asynccontextmanager
    async def open(self, session_id: str, task: trajectory_pb2.Task) -> AsyncIterator[World]:
        """The world of one episode. Raises UnknownEnvironment, which lists the known ones."""
        world = await self._make(session_id, task)
        try:
            yield world
        finally:
            try:
                await world.close()
            except FarmError as error:
                log.warning("environment not closed", environment=task.environment, cause=str(error))

    async def _make(self, session_id: str, task: trajectory_pb2.Task) -> World:
        kind = find_kind(self._built_in, task.environment)
        if kind is not None and self._is_elsewhere(task.environment):
            kind = None
        if kind is not None and kind.runs != "process":
            return LocalWorld(kind, task, self._seconds, self._environment_id, self._most_chars)
        if kind is not None:
            self._processes.want(task.environment)
        host = await self._host(task.environment, process=kind is not None)
        return RemoteWorld(host, session_id, task, self._seconds, most_chars=self._most_chars)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether it is an adapter whose package is not installed here, and that a server plays or may play."""
        if name in self._built_in or name not in ADAPTERS or is_installed(name):
            return False
        return name in self._hosts.environments or not self._hosts.are_known

    async def _host(self, name: str, *, process: bool) -> Host:
        """The best host that plays `name`, waited for: one that is full for as long as the lease lasts."""

        def ready() -> Host | None:
            return self._free(name, process=process)

        while (host := await self._hosts.changed.first(ready, self._seconds)) is None:
            if not self._hosts.playing(name, process=process):
                raise self._missing(name, process=process)
        return host

    def _free(self, name: str, *, process: bool) -> Host | None:
        """The least loaded host that plays `name` and has room; None while there may be one later."""
        playing = self._hosts.playing(name, process=process)
        if not process and name not in self._hosts.environments and self._hosts.are_known:
            raise unknown_environment(name, dict.fromkeys(self.known))
        return next((host for host in playing if host.has_room), None)

    def _missing(self, name: str, *, process: bool) -> FarmError:
        if process or name in self._hosts.environments:
            return EnvironmentFailed(
                f"Nobody who plays {name!r} has been well for {self._seconds:g} s.", environment=name
            )
        return UnknownEnvironment(
            f"No server has said within {self._seconds:g} s that it plays {name!r}. Known: {', '.join(self.known)}.",
            environment=name,
            seconds=self._seconds,
        )


def find_kind(built_in: Mapping[str, Kind], name: str) -> Kind | None:
    """The class that is built in, an adapter, or called "module:name"; None for other names.

    Raises UnknownEnvironment.
    """
    if name not in built_in and name not in ADAPTERS and ":" not in name:
        return None
    try:
        kind = find(built_in, name)
    except ConfigError as error:
        raise UnknownEnvironment(str(error), environment=name) from error
    if isinstance(kind, type) and issubclass(kind, Environment):
        return kind
    raise UnknownEnvironment(f"{name!r} is not a subclass of rollfarm.env.Environment.", environment=name)


class LocalWorld:
    """An environment in this process."""

    __slots__ = ("_play", "_seconds", "_task", "environment_id")

    def __init__(
        self, kind: Kind, task: trajectory_pb2.Task, seconds: float, environment_id: str, most_chars: int = 0
    ) -> None:
        self.environment_id = environment_id
        self._task = task
        self._seconds = seconds
        self._play = Play(kind, read_settings(kind, task.settings_json), most_chars=most_chars, seconds=seconds)

    async def reset(self) -> Observation:
        return await self._play.reset(self._task.seed, self._task.index)

    async def step(self, action: Action) -> Step:
        return await self._play.step(action)

    async def score(self, turns: Sequence[Turn], answer: str) -> Step:
        return await self._play.score(turns, answer)

    async def close(self) -> None:
        await self._play.close(self._seconds)
