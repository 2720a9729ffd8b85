"""Every kind of Redis that a journal's URL can name, each a real one."""

import asyncio
import contextlib
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis import asyncio as aioredis
from redis.exceptions import RedisError

from rollfarm.ports import free_port
from rollfarm.valkey import valkey_binary
from tests.sample_buffer.support import Valkey

PRIMARY = "farm"
"""What the Sentinel calls the server that it watches."""


@asynccontextmanager
async def valkey(*flags: str, folder: Path | None = None) -> AsyncIterator[Valkey]:
    """A Valkey in `folder`, or in one of its own; the path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="rf") as own:
        server = Valkey(folder or Path(own), *flags)
        await server.start()
        try:
            yield server
        finally:
            server.kill()


def client(server: Valkey) -> aioredis.Redis:
    """Use with `async with`."""
    return aioredis.Redis(unix_socket_path=str(server.socket))


@asynccontextmanager
async def by_port() -> AsyncIterator[str]:
    port = free_port()
    async with valkey("--port", str(port)):
        yield f"redis://127.0.0.1:{port}/3"


@asynccontextmanager
async def by_tls() -> AsyncIterator[str]:
    """TLS ends before the server, because the one that tests bring has none."""
    async with valkey() as server:
        key, certificate = self_signed(server.data)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner_reader, inner_writer = await asyncio.open_unix_connection(str(server.socket))
            async with asyncio.TaskGroup() as group:
                group.create_task(_pipe(reader, inner_writer))
                group.create_task(_pipe(inner_reader, writer))

        front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        try:
            yield f"rediss://127.0.0.1:{front.sockets[0].getsockname()[1]}/0?ssl_ca_certs={certificate}"
        finally:
            front.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()
    writer.close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """The key and the certificate of 127.0.0.1."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@asynccontextmanager
async def by_cluster() -> AsyncIterator[str]:
    """A cluster of two nodes. The URL names the one that holds no slot, after one that is not there."""
    ports, buses = (free_port(), free_port()), (free_port(), free_port())
    flags = [
        ("--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(bus))
        for port, bus in zip(ports, buses, strict=True)
    ]
    async with valkey(*flags[0]) as named, valkey(*flags[1]) as holder:
        async with client(named) as first, client(holder) as second, asyncio.timeout(20):
            await second.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            await first.execute_command("CLUSTER", "MEET", "127.0.0.1", str(ports[1]), str(buses[1]))
            for admin in (first, second):
                while not await _is_whole(admin):  # noqa: ASYNC110 - a program of others notifies nobody
                    await asyncio.sleep(0.05)
        yield f"redis+cluster://127.0.0.1:1,127.0.0.1:{ports[0]}"


async def _is_whole(admin: aioredis.Redis) -> bool:
    """Whether a node knows both nodes and all slots."""
    info = str(await admin.execute_command("CLUSTER", "INFO"))
    return "cluster_state:ok" in info and "cluster_known_nodes:2" in info


@asynccontextmanager
async def by_sentinel() -> AsyncIterator[str]:
    port = free_port()
    async with valkey("--port", str(port)), sentinel(port) as url:
        yield url


@asynccontextmanager
async def sentinel(port: int) -> AsyncIterator[str]:
    """A Sentinel that watches the server at `port`, and needs no other to decide."""
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        file, own = Path(folder) / "sentinel.conf", free_port()
        file.write_text(
            f"port {own}\nsentinel monitor {PRIMARY} 127.0.0.1 {port} 1\n"
            f"sentinel down-after-milliseconds {PRIMARY} 500\nsentinel failover-timeout {PRIMARY} 3000\n"
        )
        popen = subprocess.Popen(  # noqa: ASYNC220
            [valkey_binary(), str(file), "--sentinel"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        try:
            await _answers(own)
            # The first is no Sentinel, and nothing listens there.
            yield f"redis+sentinel://127.0.0.1:1,127.0.0.1:{own}/{PRIMARY}/0"
        finally:
            popen.kill()
            popen.wait()


async def _answers(port: int) -> None:
    async with aioredis.Redis(port=port) as admin, asyncio.timeout(20):
        while True:
            with contextlib.suppress(RedisError):
                await admin.ping()
                return
            await asyncio.sleep(0.05)
