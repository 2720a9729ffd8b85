"""The processes under load: engines that are none, and llm_proxy as a farm starts it."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal

from load_tests.buffering.servers import serving
from rollfarm import rpc
from rollfarm.errors import FarmError
from rollfarm.ports import free_port
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc


@dataclass(frozen=True)
class Engine:
    """A process that answers like an engine."""

    port: int
    pid: int
    seconds: float
    """From a request to its answer."""


@dataclass(frozen=True)
class Proxy:
    """An llm_proxy that serves one engine, or a relay to it."""

    port: int
    pid: int


@contextmanager
def engine(folder: Path, protocol: Literal["grpc", "http"], seconds: float) -> Iterator[Engine]:
    """An engine until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", f"load_tests.proxying.engine_{protocol}", str(port), str(seconds)]
    with serving(command, folder / f"engine_{protocol}.log", lambda: asyncio.run(_listens(port))) as pid:
        yield Engine(port, pid, seconds)


@contextmanager
def relay(folder: Path, engine: Engine) -> Iterator[Proxy]:
    """A relay before the engine until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "load_tests.proxying.relay", str(port), str(engine.port)]
    with serving(command, folder / "relay.log", lambda: asyncio.run(_listens(port))) as pid:
        yield Proxy(port, pid)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@contextmanager
def llm_proxy(folder: Path, engine: Engine, *flags: str) -> Iterator[Proxy]:
    """`python -m llm_proxy` until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "llm_proxy", "--llm_proxy.listen.port", str(port)]
    command += ["--llm_proxy.engines", f'["127.0.0.1:{engine.port}"]', *flags]
    with serving(command, folder / "llm_proxy.log", lambda: asyncio.run(_has_engine(f"127.0.0.1:{port}"))) as pid:
        yield Proxy(port, pid)


async def _has_engine(address: str) -> bool:
    async with rpc.channel(address) as channel:
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        request = llm_proxy_pb2.ListEnginesRequest()
        try:
            listed = await rpc.call(stub.ListEngines, request, timeout=0.5, retry=False)
        except FarmError:
            return False
        return any(one.state == llm_proxy_pb2.Engine.STATE_SERVING for one in listed.engines)


def answers_http(port: int, request: bytes) -> bool:
    """Whether the server answers the whole request with 200."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.connect()
        connection.sock.sendall(request)
        return connection.sock.recv(65536).startswith(b"HTTP/1.1 200")
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
