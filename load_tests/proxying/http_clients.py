"""What agents and trainers ask over HTTP: one request at a time on each of many connections that stay open."""

import asyncio
import time
from dataclasses import dataclass

from load_tests.proxying.flow import Flow
from load_tests.proxying.patterns import CALL_SECONDS, Pattern, connections, singly
from load_tests.proxying.wire import Messages

CONNECTS_AT_ONCE = 256


@dataclass(frozen=True)
class HttpTarget:
    """Who is asked."""

    port: int
    pid: int
    """Whose CPU time and memory count."""

    requests: tuple[bytes, ...]
    """Whole requests, asked in turn."""


class Connection(asyncio.Protocol):
    """Asks again and again."""

    def __init__(self) -> None:
        self._messages = Messages()
        self._answered: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for head, body in self._messages.received(data):
            assert self._answered is not None, head
            if b" 200 " in head:
                self._answered.set_result(body)
            else:
                self._answered.set_exception(RuntimeError(f"{head.decode()}\n{body.decode()}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError(f"The connection was closed before the answer: {exc}"))

    async def ask(self, request: bytes) -> float:
        """Seconds until the answer."""
        self._answered = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self.transport.write(request)
        await self._answered
        return time.perf_counter() - began


def http(target: HttpTarget, pattern: Pattern) -> Flow:
    """Ask by one request of each connection at a time."""
    return asyncio.run(_http(target, pattern))


async def _http(target: HttpTarget, pattern: Pattern) -> Flow:
    async with asyncio.timeout(CALL_SECONDS):
        idle = await _connect(target.port, connections(pattern))

        async def ask(number: int) -> float:
            connection = idle.pop() if idle else (await _connect(target.port, 1))[0]
            took = await connection.ask(target.requests[number % len(target.requests)])
            idle.append(connection)
            return took

        try:
            return await singly(ask, pattern, target.pid)
        finally:
            for connection in idle:
                connection.transport.close()


async def _connect(port: int, count: int) -> list[Connection]:
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    while len(opened) < count:
        some = min(CONNECTS_AT_ONCE, count - len(opened))
        pairs = await asyncio.gather(*(loop.create_connection(Connection, "127.0.0.1", port) for _ in range(some)))
        opened += [connection for _, connection in pairs]
    return opened
