"""Environment servers that env_manager dials, in any language. Each is asked now and then what it plays.

A DNS name stands for every address that it resolves to, and each of those is a server of its own.
"""

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence
from typing import Any

import structlog
from grpc import aio

from env_manager.hosts import Host, Hosts, Request
from env_manager.steps import Steps
from rollfarm import rpc
from rollfarm.errors import EnvironmentFailed, FarmError, InvalidAnswer, Unavailable
from rollfarm.service import Changed
from rollfarm.v1 import environment_pb2
from rollfarm.v1.environment_pb2_grpc import EnvironmentServiceStub

log = structlog.get_logger()

DESCRIBE_SECONDS = 10.0
"""How long a server may take to say what it plays. A slower one gets no new episodes until it has."""

HEALTH_SECONDS = 5.0
"""How often it is asked, and names are looked up again."""

OUTAGE_SECONDS = 5.0
"""How long a call is tried again while the server cannot be reached: an outage of a server mostly ends its episodes."""

BACKOFF_SECONDS = 0.1

_METHODS = {
    environment_pb2.ResetRequest: "Reset",
    environment_pb2.StepRequest: "Step",
    environment_pb2.EnvironmentServiceScoreRequest: "Score",
    environment_pb2.CloseRequest: "Close",
}


class Server(Host):
    """One environment server."""

    kind = environment_pb2.EnvironmentHost.KIND_SERVER

    def __init__(self, address: str, changed: Changed, stub: Any) -> None:
        """`stub` is an EnvironmentServiceStub on an aio channel."""
        super().__init__(address, changed)
        self.gone = ""
        """Why it will not be back, in words; empty while it may be."""
        self.well_at = time.monotonic()
        """When it last said what it plays."""
        self.steps = Steps(address, stub)
        """Its stream, while `keep` keeps it."""
        self._stub = stub
        self._doubted = asyncio.Event()

    async def watch(self) -> None:
        """Ask what it plays, again and again, until it is gone."""
        while not self.gone:
            await self.describe()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_SECONDS):
                    await self._doubted.wait()
            self._doubted.clear()

    def leave(self, why: str) -> None:
        """It will not be back: it gets no new episode, and is not waited for."""
        self.gone, self.is_healthy = why, False
        self._doubted.set()
        self.changed.notify()

    async def describe(self) -> None:
        """Ask what it plays, for a while. It is well when it answers."""
        was_healthy = self.is_healthy
        try:
            request = environment_pb2.DescribeRequest()
            answer = await rpc.call(self._stub.Describe, request, timeout=DESCRIBE_SECONDS)
        except FarmError as error:
            self.is_healthy = False
            if not self.gone:
                log.warning("environment server is not there", server=self.address, cause=str(error))
            return
        if not self.gone:
            self.well_at = time.monotonic()
            self.described(answer)
            if not was_healthy:
                log.info("environment server found", server=self.address, environments=sorted(self.environments))

    async def ask(self, request: Request, seconds: float) -> Any:
        end = time.monotonic() + seconds
        try:
            if isinstance(request, environment_pb2.StepRequest):
                answer = await self.steps.ask(request, seconds)
                if answer is not None:
                    return answer
            return await self._call(getattr(self._stub, _METHODS[type(request)]), request, end - time.monotonic())
        except FarmError as error:
            if error.reason in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                self.failed()
                self._doubted.set()
            cause = self.gone or str(error)
            raise EnvironmentFailed(f"Environment server {self.address}: {cause}", server=self.address) from error

    async def _call(self, method: Any, request: Request, seconds: float) -> Any:
        """Call, and while the server cannot be reached, call again."""
        end = time.monotonic() + min(seconds, OUTAGE_SECONDS)
        while True:
            try:
                return await rpc.call(method, request, timeout=seconds, retry=False)
            except InvalidAnswer:
                raise
            except Unavailable:
                if self.gone or time.monotonic() + BACKOFF_SECONDS >= end:
                    raise
            await asyncio.sleep(BACKOFF_SECONDS)


class Servers:
    """The servers that the configuration names, wherever their names point at the time."""

    def __init__(self, names: Sequence[str], hosts: Hosts) -> None:
        """`names` are host:port."""
        self._names = names
        self._hosts = hosts
        hosts.awaited.update(names)

    async def run(self) -> None:
        """Find the servers of every name, again and again, and watch each."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        known: dict[str, Server] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    addresses = await resolve(name)
                except OSError as error:
                    log.warning("environment server's name is not resolved", name=name, cause=str(error))
                else:
                    for address in addresses - set(known):
                        channel = rpc.channel(address, spread=False)
                        known[address] = Server(address, self._hosts.changed, EnvironmentServiceStub(channel))
                        self._hosts.add(known[address])
                        group.create_task(keep(known[address], channel, self._hosts))
                    for address in set(known) - addresses:
                        known.pop(address).leave(f"{name} no longer points there.")
                    self._hosts.awaited.discard(name)
                await asyncio.sleep(HEALTH_SECONDS)


async def keep(server: Server, channel: aio.Channel, hosts: Hosts) -> None:
    """Watch a server until it is gone, and hold its channel until its last episode has ended."""
    async with channel, asyncio.TaskGroup() as group:
        streaming = group.create_task(server.steps.run())
        await server.watch()
        log.info("environment server left", server=server.address, episodes=server.open_count)
        hosts.remove(server)
        while server.open_count:
            await hosts.changed.first(lambda: not server.open_count or None, HEALTH_SECONDS)
        streaming.cancel()


async def resolve(name: str) -> set[str]:
    """The addresses that host:port stands for: the IPv4 ones, where it has both kinds. Raises OSError."""
    host, _, port = name.removeprefix("dns:///").rpartition(":")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return {name}
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    old = {f"{address[0]}:{port}" for family, *_, address in found if family == socket.AF_INET}
    return old or {f"[{address[0]}]:{port}" for *_, address in found}
