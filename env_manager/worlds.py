"""Where environments are found: built in, a class of the user's own, or served elsewhere over gRPC.

Whatever an environment does wrong becomes a FarmError that says which one and how; nothing else is disturbed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from env_manager.environments import ENVIRONMENTS
from env_manager.remote import RemoteWorld, Server
from rollfarm.config import ConfigError
from rollfarm.env import Environment, Kind, Observation, Play, Step, name_of, read_settings, unknown_environment
from rollfarm.errors import EnvironmentFailed, FarmError, UnknownEnvironment
from rollfarm.registry import resolve
from rollfarm.service import Changed
from rollfarm.v1 import trajectory_pb2

log = structlog.get_logger()


class World(Protocol):
    """One episode's environment, wherever it is."""

    environment_id: str
    """The process that answers."""

    async def reset(self) -> Observation: ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None: ...


class Worlds:
    """Every environment that this worker can play."""

    def __init__(
        self,
        servers: Sequence[Server] = (),
        *,
        environment_seconds: float = 60.0,
        environment_id: str = "",
        built_in: Mapping[str, Kind] = ENVIRONMENTS,
    ) -> None:
        """`environment_id` names the ones that run in this process."""
        self._servers = servers
        self._seconds = environment_seconds
        self._environment_id = environment_id
        self._built_in = built_in
        self._described = Changed()

    async def describe(self) -> None:
        """Ask every server what it plays, until each has answered."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._describe(server))

    async def _describe(self, server: Server) -> None:
        await server.describe()
        for name in sorted(server.environments & set(self._built_in)):
            log.warning("environment is built in; the server's is not used", environment=name, server=server.address)
        self._described.notify()

    @property
    def known(self) -> list[str]:
        """The names that can be played now."""
        return sorted(set(self._built_in).union(*(server.environments for server in self._servers)))

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
        kind = self._local(task.environment)
        if kind is not None:
            return LocalWorld(kind, task, self._seconds, self._environment_id)
        server = await self._described.first(lambda: self._find(task.environment), self._seconds)
        if server is None:
            raise UnknownEnvironment(
                f"No server has said within {self._seconds:g} s that it plays {task.environment!r}.",
                environment=task.environment,
                seconds=self._seconds,
            )
        return RemoteWorld(server, session_id, task, self._seconds)

    def _local(self, name: str) -> Kind | None:
        if name in self._built_in or ":" in name:
            try:
                kind = resolve(self._built_in, name, what="environment")
            except ConfigError as error:
                raise UnknownEnvironment(str(error), environment=name) from error
            if isinstance(kind, type) and issubclass(kind, Environment):
                return kind
            raise UnknownEnvironment(f"{name!r} is not a subclass of rollfarm.env.Environment.", environment=name)
        return None

    def _find(self, name: str) -> Server | None:
        """The least loaded server that plays `name`; None while one that may has not been heard."""
        playing = [server for server in self._servers if name in server.environments]
        if playing:
            return min(playing, key=lambda server: (server.is_resting, server.open_count))
        if all(server.is_described for server in self._servers):
            raise unknown_environment(name, dict.fromkeys(self.known))
        return None


class LocalWorld:
    """An environment in this process."""

    def __init__(self, kind: Kind, task: trajectory_pb2.Task, seconds: float, environment_id: str) -> None:
        self.environment_id = environment_id
        self._kind = kind
        self._task = task
        self._seconds = seconds
        self._play = Play(kind, read_settings(kind, task.settings_json))

    async def reset(self) -> Observation:
        if self._kind.fast:
            return await self._play.reset(self._task.seed, self._task.index)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._play.reset(self._task.seed, self._task.index)
        except TimeoutError:
            raise self._hung("reset") from None

    async def step(self, action: str) -> Step:
        if self._kind.fast:
            return await self._play.step(action)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._play.step(action)
        except TimeoutError:
            raise self._hung("step") from None

    async def close(self) -> None:
        await self._play.close(self._seconds)

    def _hung(self, call: str) -> EnvironmentFailed:
        name = name_of(self._kind)
        return EnvironmentFailed(f"Environment {name}: {call} gave no answer in {self._seconds:g} s.", environment=name)
