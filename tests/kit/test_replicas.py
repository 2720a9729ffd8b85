"""One address, many servers: calls are spread over them, and those that come and go are noticed."""

import asyncio
import ipaddress
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from rollfarm import rpc, service
from rollfarm.config import Listen
from rollfarm.v1 import engine_pb2, engine_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.kit.replica import Replica

SECONDS = 20.0


class Names(asyncio.DatagramProtocol):
    """A DNS server for which every name has the same addresses."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        question = data[12 : data.index(0, 12) + 5]
        asks_for_ipv4 = question[-4:-2] == bytes([0, 1])
        answers = [
            struct.pack(">HHHIH4s", 0xC00C, 1, 1, 0, 4, ipaddress.IPv4Address(address).packed)
            for address in (self.addresses if asks_for_ipv4 else [])
        ]
        header = data[:2] + struct.pack(">HHHHH", 0x8180, 1, len(answers), 0, 0)
        self._transport.sendto(header + question + b"".join(answers), addr)


@asynccontextmanager
async def name_server(*addresses: str) -> AsyncIterator[tuple[Names, int]]:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    names.addresses = list(addresses)
    try:
        yield names, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


@pytest.fixture(autouse=True)
def _short_lived_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CONNECTION_SECONDS", 0.2)


async def ask(channel: aio.Channel, *, retry: bool = False) -> str:
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    request = trainer_pb2.GetProgressRequest()
    return (await rpc.call(stub.GetProgress, request, timeout=SECONDS, retry=retry)).run_id


async def until_asked(channel: aio.Channel, name: str) -> None:
    async with asyncio.timeout(SECONDS):
        while await ask(channel) != name:
            pass


async def test_an_open_stream_goes_on_and_no_call_fails_while_connections_are_renewed() -> None:
    replica = Replica("a")
    async with replica.serving() as address, rpc.channel(address) as channel:
        stream = engine_pb2_grpc.EngineServiceStub(channel).Generate(timeout=SECONDS)

        while len(replica.connections) < 5:
            assert await ask(channel) == "a"
            await stream.write(engine_pb2.EngineServiceGenerateRequest())
            assert await stream.read() != aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

        stream.cancel()


async def test_calls_are_spread_over_every_address_and_go_on_when_a_server_is_killed() -> None:
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kit.replica", "killed"), stdout=asyncio.subprocess.PIPE
    )
    assert killed.stdout is not None
    port = int(await killed.stdout.readline())
    async with Replica("left").serving() as left, rpc.channel(f"ipv4:127.0.0.1:{port},{left}") as channel:
        await until_asked(channel, "left")
        await until_asked(channel, "killed")
        before = Counter([await ask(channel) for _ in range(20)])
        killed.kill()
        after = {await ask(channel, retry=True) for _ in range(20)}
        await killed.wait()

    assert min(before["left"], before["killed"]) >= 5
    assert "left" in after


async def test_a_replica_that_joins_the_name_gets_calls() -> None:
    async with Replica("first").serving() as first:
        port = int(first.split(":")[1])
        async with (
            Replica("joined").serving(Listen(host="127.0.0.2", port=port)),
            name_server("127.0.0.1") as (names, names_port),
            rpc.channel(f"dns://127.0.0.1:{names_port}/replicas.test:{port}") as channel,
        ):
            assert await ask(channel) == "first"

            names.addresses.append("127.0.0.2")

            await until_asked(channel, "joined")
