"""An inference server beside this host, and its HTTP: a child of this process, or one that is attached by its URL.

A child ends with this process, however it ends, for its standard input does. An attached server is neither started nor
stopped. Nothing that a server answers is believed before it has the expected shape: anything else is EngineFailed, of
the request that asked.
"""

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from llm_proxy.engine.config import ServerConfig
from llm_proxy.engine.requests import Chunk
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, GenerationFailed, InvalidArgument

Answer = TypeVar("Answer", bound=msgspec.Struct)
T = TypeVar("T")

LOWEST_LOGPROB = -9999.0
"""What servers write for a log-probability that is not finite, since JSON has no such number."""

_STOP_SECONDS = 15.0
_READY_SECONDS = 0.2
_WATCH_SECONDS = 2.0
_KEEP_SECONDS = 4.0
"""How long a connection waits for its next use: less than the 5 s after which uvicorn closes it."""

_SHOWN_BYTES = 300

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for JSON that is none or not as expected."""

_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"


class _Said(NamedTuple):
    status: int
    content: bytes

    @property
    def start(self) -> str:
        return repr(self.content[:_SHOWN_BYTES].decode(errors="replace"))


class _Problem(msgspec.Struct):
    code: int
    message: str


class _Problems(msgspec.Struct):
    """What servers send in a stream where they would have answered with another status."""

    error: _Problem


class InferenceServer:
    """One server. Its routes are unauthenticated: it listens on loopback, or on a private socket."""

    def __init__(
        self,
        title: str,
        table: str,
        config: ServerConfig,
        *,
        port: int = 0,
        socket: Path | None = None,
        health: str = "/health",
    ) -> None:
        """A child listens on `socket`, or on `port` where there is none."""
        self.title = title
        """As people call it."""

        self._table = table
        self._config = config
        self._health = health
        self._child: asyncio.subprocess.Process | None = None
        self.url = config.url or f"http://127.0.0.1:{port or 80}"
        """Where it listens, unless on a private socket."""

        self._socket = None if config.url else socket
        self._session: aiohttp.ClientSession | None = None

    @property
    def _http(self) -> aiohttp.ClientSession:
        """Opened at its first use, since it belongs to the event loop."""
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=_KEEP_SECONDS)
                if self._socket is not None
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS)
            )
            self._session = aiohttp.ClientSession(
                self.url,
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                json_serialize=lambda body: msgspec.json.encode(body).decode(),
            )
        return self._session

    async def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the child, whose log goes to this process's, and wait until it is healthy. Raises ConfigError."""
        self._child = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
        )
        if not await self._becomes_healthy():
            raise ConfigError(
                f"{self._table}: {self.title} is not ready within {self._config.start_seconds:g} s; its log is above. "
                f"Raise {self._table}.start_seconds."
            )

    async def attach(self) -> None:
        """Wait until the server that somebody else runs is healthy. Raises ConfigError."""
        if not await self._becomes_healthy():
            raise ConfigError(
                f"{self._table}.url: nothing healthy answers at {self.url}{self._health} within "
                f"{self._config.start_seconds:g} s. Start {self.title} there, correct the address, or leave it empty: "
                "then the host starts one itself."
            )

    async def _becomes_healthy(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.start_seconds):
                while not await self._is_healthy():
                    if self._child is not None and self._child.returncode is not None:
                        raise ConfigError(
                            f"{self._table}: {self.title} ended with status {self._child.returncode} while it started; "
                            "its log is above. Correct what it complains about, or install it again."
                        )
                    await asyncio.sleep(_READY_SECONDS)
                return True
        return False

    async def _is_healthy(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return (await self._send("GET", self._health)).status == 200
        return False

    async def watch(self) -> None:
        """Raise EngineFailed once the server is gone."""
        if self._child is not None:
            raise EngineFailed(
                f"{self.title} ended by itself with status {await self._child.wait()}; its log is above."
            )
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await self._send("GET", self._health)
            except aiohttp.ClientConnectorError as error:
                raise EngineFailed(f"{self.title} at {self.url} is gone: {error!r}.") from error
            except aiohttp.ClientError:
                pass  # alive, if not well: `check` tells

    async def stop(self) -> None:
        """End the child, by force if it takes long. An attached server goes on."""
        child = self._child
        if child is not None and child.returncode is None:
            child.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
        await self._http.close()

    async def check(self, seconds: float) -> None:
        """Raise EngineFailed unless the server says within `seconds` that it is well."""
        try:
            async with asyncio.timeout(seconds):
                said = await self._send("GET", self._health)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{self.title} does not answer: {error!r}.") from error
        if said.status != 200:
            raise EngineFailed(f"{self.title} is not well: it answers {self._health} with {said.status}.")

    async def page(self, path: str) -> str:
        """The text of a page. Raises EngineFailed."""
        return (await self._call("GET", path)).content.decode(errors="replace")

    async def has(self, path: str) -> bool:
        """Whether the server knows the path. Raises EngineFailed."""
        try:
            return (await self._send("GET", path)).status != 404
        except aiohttp.ClientError as error:
            raise EngineFailed(f"{self.title} does not answer {path}: {error!r}.") from error

    async def read(self, path: str, answer: type[Answer]) -> Answer:
        """What a GET answers. Raises EngineFailed, and InvalidArgument where the server refuses."""
        return self._parsed(path, await self._call("GET", path), answer)

    async def ask(self, path: str, answer: type[Answer], body: Mapping[str, Any]) -> Answer:
        """What a POST answers. Raises EngineFailed, and InvalidArgument where the server refuses."""
        return self._parsed(path, await self._call("POST", path, body), answer)

    async def tell(
        self, path: str, body: Mapping[str, Any] | None = None, *, params: Mapping[str, str] | None = None
    ) -> None:
        """A POST of which only success matters. Raises EngineFailed, and InvalidArgument where the server refuses."""
        await self._call("POST", path, body, params)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> _Said:
        """An answer with status 200."""
        with self._reaching(path):
            said = await _twice(lambda: self._send(method, path, body, params))
        self.check_status(path, said.status, said.start)
        return said

    @contextlib.contextmanager
    def _reaching(self, path: str) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientError as error:
            raise EngineFailed(f"{self.title} does not answer {path}: {error!r}.") from error

    def check_status(self, path: str, status: int, said: str) -> None:
        """Raise InvalidArgument where the server refuses, and EngineFailed where it fails."""
        if status in (400, 422):
            raise InvalidArgument(f"{self.title} refuses {path}: {said}.")
        if status != 200:
            raise EngineFailed(f"{self.title} answers {path} with {status}: {said}.")

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> _Said:
        async with self._http.request(method, path, json=body, params=params) as answer:
            return _Said(answer.status, await answer.read())

    async def answers(self, path: str, answer: type[Answer], body: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        """What a POST answers: one answer, or a stream of them where the body asks for it. Raises as `ask` does, also
        midway. Who leaves early closes the connection."""
        if not body["stream"]:
            yield await self.ask(path, answer, body)
            return
        with self._reaching(path):
            response = await _twice(lambda: self._http.request("POST", path, json=body))
            async with response:
                if response.status != 200:
                    self.check_status(path, response.status, _Said(response.status, await response.read()).start)
                async for line in _lines(response.content.iter_any()):
                    if line == _EVENT + _LAST_EVENT:
                        return
                    if line:
                        yield self._event(path, line, answer)
        raise EngineFailed(f"{self.title} ends its answer to {path} midway.")

    def _event(self, path: str, line: bytes, answer: type[Answer]) -> Answer:
        content = line.removeprefix(_EVENT)
        with contextlib.suppress(*_MALFORMED):
            return msgspec.json.decode(content, type=answer)
        with contextlib.suppress(*_MALFORMED):
            problem = msgspec.json.decode(content, type=_Problems).error
            self.check_status(path, problem.code, problem.message)
        return self._parsed(path, _Said(200, content), answer)

    def _parsed(self, path: str, said: _Said, answer: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(said.content, type=answer)
        except _MALFORMED as error:
            raise EngineFailed(f"{self.title} answers {path} with something else ({error}): {said.start}.") from error

    def verify(self, path: str, chunk: Chunk, *, vocabulary_size: int, top_logprobs: int) -> None:
        """Raise EngineFailed unless every token of the chunk is in the vocabulary and has its log-probability and,
        where asked for, the likeliest at its place; and GenerationFailed where a log-probability is not finite."""
        count = len(chunk.token_ids)
        if count != len(chunk.logprobs):
            raise EngineFailed(
                f"{self.title} answers {path} with {count} tokens, {len(chunk.logprobs)} log-probabilities."
            )
        if len(chunk.top) != (count if top_logprobs else 0):
            raise EngineFailed(
                f"{self.title} answers {path} with {count} tokens and the likeliest at {len(chunk.top)} places."
            )
        strange = [token for token in chunk.token_ids if not 0 <= token < vocabulary_size]
        if strange:
            raise EngineFailed(
                f"{self.title} answers {path} with token {strange[0]}, which is outside of the model's vocabulary of "
                f"{vocabulary_size}: it serves another model."
            )
        if any(not math.isfinite(logprob) or logprob <= LOWEST_LOGPROB for logprob in chunk.logprobs):
            raise GenerationFailed(f"{self.title} gives no finite log-probability.")


async def _twice(send: Callable[[], Awaitable[T]]) -> T:
    """What `send` returns; where the server had closed the connection meanwhile, with a new one."""
    try:
        return await send()
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return await send()


async def _lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Each whole line, however long."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def read_metrics(page: str) -> dict[str, float]:
    """Values of a Prometheus page by name; of several with one name the last."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                values[name.partition("{")[0]] = float(value)
    return values
