"""Runs an agent in a container of its own for one episode, by the `docker` package.

The daemon keeps the output and bounds it. Invariant: when `run` has returned or raised, the container is removed, or
its removal is under way; one that outlives a killed env_manager is removed by the next one that starts, once its time
is over.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import structlog

from env_manager.agent_config import AgentConfig
from env_manager.runners import Ran
from rollfarm import foreign
from rollfarm.errors import AgentFailed, PackageMissing
from rollfarm.threads import in_thread

log = structlog.get_logger()

END_LABEL = "rollfarm.agent.end"
"""When a container's time is over, in seconds since the epoch."""

SPARE_SECONDS = 60
"""How much longer a container may live before another env_manager takes it for abandoned."""

STDERR_BYTES = 2000
"""Of stderr, this much is kept: its end."""

T = TypeVar("T")


class ContainerRunner:
    """Starts a container of the image for each episode."""

    def __init__(self, config: AgentConfig, variables: Mapping[str, str]) -> None:
        """Raises PackageMissing without `docker`; its daemon is asked when the first episode is played."""
        self._config = config
        self._variables = variables
        self._docker = _import_docker()
        self._client: Any = None
        self._connecting = threading.Lock()

    async def run(self, text: str, variables: Mapping[str, str], seconds: float) -> Ran:
        """What became of the agent that read `text`."""
        container = _Container()
        try:
            await self._call(lambda: container.start(self._connect(), self._options(variables, seconds), text))
            try:
                async with asyncio.timeout(seconds):
                    status = await self._call(container.wait)
            except TimeoutError:
                status = None
                await self._call(container.kill)
            answer, complaint = await self._call(lambda: container.said(self._config.output_bytes))
            return Ran(answer=answer, status=status, complaint=complaint)
        finally:
            in_thread(container.remove)

    async def _call(self, work: Callable[[], T]) -> T:
        """In a thread, since the package blocks."""
        try:
            return await in_thread(work)
        except (self._docker.errors.DockerException, OSError) as error:
            problem = f"The agent's container failed: {foreign.cause(error)}."
            raise AgentFailed(problem, image=self._config.image) from error

    def _connect(self) -> Any:
        with self._connecting:
            if self._client is None:
                client = self._docker.from_env(timeout=self._config.seconds + SPARE_SECONDS)
                _remove_abandoned(client, self._docker.errors.DockerException)
                self._client = client
            return self._client

    def _options(self, variables: Mapping[str, str], seconds: float) -> dict[str, Any]:
        config = self._config
        kept = max(config.output_bytes, STDERR_BYTES)
        return {
            "image": config.image,
            "command": config.command or None,
            "environment": {**self._variables, **variables},
            "network": config.network,
            "mem_limit": config.memory_bytes or None,
            "labels": {END_LABEL: str(int(time.time() + seconds) + SPARE_SECONDS)},
            "stdin_open": True,
            "init": True,
            "log_config": self._docker.types.LogConfig(
                type="json-file", config={"max-size": str(2 * kept + 1_000_000), "max-file": "2"}
            ),
        }


class _Container:
    """One container. Its methods block. One that is removed before it was started is never started."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._container: Any = None
        self._unwanted = False

    def start(self, client: Any, options: Mapping[str, Any], text: str) -> None:
        """Start it with `text` on its stdin."""
        with self._starting:
            if self._unwanted:
                return
            self._container = client.containers.create(**options)
            stream = self._container.attach_socket(params={"stdin": 1, "stream": 1})
            self._container.start()
        # What it does not read is not waited for: the daemon lets go once it ends.
        threading.Thread(target=_write, args=(stream, text.encode()), daemon=True).start()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._container.wait()["StatusCode"]

    def kill(self) -> None:
        self._container.kill()
        self._container.wait()

    def said(self, most: int) -> tuple[str, str]:
        """The ends of what it printed and of what it complained."""
        return self._tail(most, stdout=True, stderr=False), self._tail(STDERR_BYTES, stdout=False, stderr=True)

    def remove(self) -> None:
        with self._starting:
            self._unwanted = True
            if self._container is not None:
                self._container.remove(force=True)

    def _tail(self, most: int, **which: bool) -> str:
        kept = bytearray()
        for chunk in self._container.logs(stream=True, follow=False, **which):
            kept += chunk
            del kept[:-most]
        return kept.decode(errors="replace").strip()


def _write(stream: Any, text: bytes) -> None:
    """Write it all and close, which the agent sees as the end of its stdin."""
    try:
        stream._sock.sendall(text)
        stream._sock.shutdown(socket.SHUT_WR)
    except OSError:
        log.debug("an agent ended without reading its task")
    finally:
        stream.close()


def _remove_abandoned(client: Any, docker_error: type[Exception]) -> None:
    """Those whose time is over, whoever started them."""
    for container in client.containers.list(all=True, filters={"label": END_LABEL}):
        if float(container.labels[END_LABEL]) < time.time():
            try:
                container.remove(force=True)
            except docker_error as error:
                log.warning("abandoned container not removed", container=container.name, cause=str(error))


def _import_docker() -> Any:
    try:
        import docker
    except ImportError:
        raise PackageMissing("The package docker is not installed: `pip install 'rollfarm[docker]'`.") from None
    return docker
