"""Containers around model-written programs: one for each run, or one for each episode of many runs.

Both by the `docker` package and the daemon that DOCKER_HOST names, or the local one. Images are never pulled.
"""

import asyncio
import contextlib
import io
import random
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rollfarm.errors import PackageMissing, SandboxFailed
from rollfarm.sandbox import inside
from rollfarm.sandbox.cells import GRACE_SECONDS, finished, question, text
from rollfarm.sandbox.config import SandboxConfig
from rollfarm.sandbox.inside import frames
from rollfarm.sandbox.levels import BOOT, FOLDER, KIT
from rollfarm.sandbox.program import PYTHON, Ending, Finished, Limits, Program
from rollfarm.threads import in_thread

T = TypeVar("T")

STDOUT, STDERR = 1, 2
SIGNALLED = 128
"""Plus its number is the exit code of a command that a signal ended, or that says so."""
PYTHON_OF_IMAGE = "python3"
PING_SECONDS = 5
START_SECONDS = 60
OWN_BYTES = 64 * 2**20
"""Memory of a container beside its program's."""

OWN_PROCESSES = 8
SHARED_BYTES = 2**20
"""In /dev/shm, enough for semaphores."""

ANSWERS = "1"
"""Where a cell in a container answers: at its standard output."""

LABEL = "rollfarm.sandbox"
WAITING = ["cat"]
"""The first process of a container of many runs: it ends with its input, and so with the service at the latest."""

WAITING_USER = "65533:65533"
"""Whose that process is, so that killing everything of a run's user leaves it."""

USERS = range(20_000, 60_000)
"""One is drawn for each container, since the kernel counts processes by user."""


def problem(image: str) -> str:
    """Why no containers of `image` can be had here; empty if they can."""
    try:
        docker = _docker()
    except PackageMissing as missing:
        return str(missing)
    try:
        with contextlib.closing(docker.from_env(timeout=PING_SECONDS)) as client:
            client.ping()
            client.images.get(image)
    except docker.errors.ImageNotFound:
        return f"the image {image} is not there; `docker pull` it."
    except (docker.errors.DockerException, OSError) as error:
        return f"no docker daemon answers ({type(error).__name__}); give this user access to one."
    return ""


class Containers:
    """A container for each run, in which a cell watches the program. It belongs to the event loop it was made in."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(config.workers)
        self._client = _docker().from_env(timeout=START_SECONDS)

    @property
    def usable(self) -> bool:
        """The running loop is that of these containers."""
        return self._loop is asyncio.get_running_loop()

    async def run(self, program: Program, limits: Limits) -> Finished:
        """How `program` ended. Raises SandboxFailed."""
        async with self._free:
            door = await _in_docker(lambda: self._started(limits))
            try:
                return await _in_docker(lambda: _ask(door, program, limits))
            finally:
                _hang_up(door)  # at which the cell ends, and its container removes itself

    def close(self) -> None:
        """Let go of the daemon."""
        self._client.close()

    def _started(self, limits: Limits) -> Any:
        container = self._client.containers.create(
            self._config.image,
            [PYTHON_OF_IMAGE, "-I", "-c", BOOT.format(module="cell"), KIT, FOLDER, ANSWERS, ""],
            entrypoint="",
            stdin_open=True,
            read_only=True,
            auto_remove=True,
            user=_user(),
            environment={"LANG": "C.UTF-8"},
            tmpfs={FOLDER: f"rw,exec,nosuid,nodev,mode=1777,size={self._config.limits.file_bytes}"},
            volumes={str(Path(inside.__file__).parent): {"bind": f"{KIT}/inside", "mode": "ro"}},
            **_walls(limits, limits.file_bytes + OWN_BYTES),
        )
        door = container.attach_socket(params={"stdin": 1, "stdout": 1, "stream": 1})
        container.start()
        return door


class ContainerRunner:
    """Runs commands one after the other in one container: what they write stays until the runner is closed.

    For episodes in which a model works on a repository that an image brings. Use it as an async context manager.
    """

    def __init__(
        self,
        image: str,
        *,
        folder: str = "/tmp",
        user: str = "65534:65534",
        network: str = "none",
        limits: Limits | None = None,
    ) -> None:
        """Nothing starts yet. `folder` is where files go and commands begin; it must be the user's to write to."""
        self._image = image
        self._folder = folder
        self._user = user
        self._network = network
        self._limits = limits or Limits()
        self._client: Any = None
        self._container: Any = None
        self._door: Any = None

    async def __aenter__(self) -> "ContainerRunner":
        await _in_docker(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.shield(_in_docker(self._stop))

    async def run(self, program: Program, limits: Limits | None = None) -> Finished:
        """Write the program's files, run its command, and say how that ended. Raises SandboxFailed.

        A command that takes too long, or writes too much, is killed with everything that runs in the container.
        Memory and processes are those that the container was started with.
        """
        limits = limits or self._limits
        return await _in_docker(lambda: self._run(program, limits))

    def _start(self) -> None:
        self._client = _docker().from_env(timeout=START_SECONDS)
        walls = {**_walls(self._limits, OWN_BYTES), "network_mode": self._network}
        self._container = self._client.containers.create(
            self._image,
            WAITING,
            entrypoint="",
            init=True,
            stdin_open=True,
            auto_remove=True,
            working_dir=self._folder,
            user=WAITING_USER,
            **walls,
        )
        self._door = self._container.attach_socket(params={"stdin": 1, "stream": 1})
        self._container.start()

    def _stop(self) -> None:
        with contextlib.closing(self._client):
            if self._container is not None:
                self._container.kill()
            if self._door is not None:
                _hang_up(self._door)

    def _run(self, program: Program, limits: Limits) -> Finished:
        if program.files:
            self._container.put_archive(self._folder, _archive(program, self._user))
        api, began = self._client.api, time.monotonic()
        command = [PYTHON_OF_IMAGE if word == PYTHON else word for word in program.command]
        made = api.exec_create(self._container.id, command, stdin=True, user=self._user, workdir=self._folder)["Id"]
        door = api.exec_start(made, socket=True)
        try:
            ending, stdout, stderr = _talk(door, program, limits)
        finally:
            _hang_up(door)  # before the daemon is asked for more: it waits for what nobody reads
        if ending != "exited":
            self._container.exec_run(["sh", "-c", "kill -9 -1"], user=self._user)
        seconds = time.monotonic() - began
        code = api.exec_inspect(made)["ExitCode"] if ending == "exited" else None
        if code is not None and code > SIGNALLED:
            ending, code = "killed", SIGNALLED - code
        return Finished(ending, code, text(stdout), text(stderr), seconds)


def _docker() -> Any:
    try:
        import docker
    except ImportError:
        raise PackageMissing("The package docker is missing: `pip install 'rollfarm[docker]'`.") from None
    return docker


async def _in_docker(work: Callable[[], T]) -> T:
    """The result of `work`, which speaks with the daemon. What goes wrong there is the sandbox's fault."""
    docker = _docker()
    try:
        return await in_thread(work)
    except (docker.errors.DockerException, OSError, EOFError) as error:
        raise SandboxFailed(f"A container failed ({error or type(error).__name__}).") from None


def _walls(limits: Limits, beside_bytes: int) -> dict[str, Any]:
    memory = limits.memory_bytes + beside_bytes
    return {
        "network_mode": "none",
        "hostname": "sandbox",
        "ipc_mode": "private",
        "shm_size": SHARED_BYTES,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": limits.processes + OWN_PROCESSES,
        "mem_limit": memory,
        "memswap_limit": memory,
        "labels": [LABEL],
    }


def _user() -> str:
    uid = random.SystemRandom().choice(USERS)
    return f"{uid}:{uid}"


def _ask(door: Any, program: Program, limits: Limits) -> Finished:
    """Speak with the cell behind `door`."""
    connection = _connection(door)
    connection.settimeout(limits.seconds + GRACE_SECONDS)
    connection.sendall(question(program, limits))
    said = b""
    for stream, part in _frames(door):
        said += part if stream == STDOUT else b""
        head = said[len(frames.HELLO) :][: frames.ANSWER.size]
        if len(head) == frames.ANSWER.size:
            *_, out, err = frames.ANSWER.unpack(head)
            rest = said[len(frames.HELLO) + frames.ANSWER.size :]
            if len(rest) >= out + err:
                return finished(head, rest[:out], rest[out : out + err])
    raise EOFError("it said nothing")


def _talk(door: Any, program: Program, limits: Limits) -> tuple[Ending, bytes, bytes]:
    """Give a command its input, and take what it writes until it ends, or may not go on."""
    connection = _connection(door)
    deadline = time.monotonic() + limits.seconds
    written = {STDOUT: b"", STDERR: b""}
    connection.settimeout(limits.seconds)
    ending: Ending = "exited"
    try:
        connection.sendall(program.stdin if isinstance(program.stdin, bytes) else program.stdin.encode())
        connection.shutdown(socket.SHUT_WR)
        for stream, part in _frames(door):
            written[stream] += part
            if len(written[STDOUT]) + len(written[STDERR]) > limits.output_bytes:
                ending = "output"
                break
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
    except TimeoutError:
        ending = "timeout"
    stdout = written[STDOUT][: limits.output_bytes]
    return ending, stdout, written[STDERR][: limits.output_bytes - len(stdout)]


def _frames(door: Any) -> Iterator[tuple[int, bytes]]:
    """What comes out of a container, by stream. Raises TimeoutError by the connection's own."""
    connection = _connection(door)
    while head := _exactly(connection, 8):
        stream, size = head[0], int.from_bytes(head[4:], "big")
        yield stream, _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """As many bytes, or none when the other end is done."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _connection(door: Any) -> socket.socket:
    """The socket in what the docker package gives."""
    return getattr(door, "_sock", door)


def _hang_up(door: Any) -> None:
    with contextlib.suppress(OSError):
        _connection(door).shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        door.close()


def _archive(program: Program, user: str) -> bytes:
    """The program's files, of `user`."""
    uid, _, gid = user.partition(":")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in program.files.items():
            data = content if isinstance(content, bytes) else content.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o755, int(uid), int(gid or uid)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
