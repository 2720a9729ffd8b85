"""llm_proxy as the process that it is."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

from rollfarm import rpc
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc
from tests.llm_proxy.support import SECONDS, Proxy, asked, assert_exact


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Proxy]]:
    """`python -m llm_proxy` on a port of the system's choice."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llm_proxy", "--llm_proxy.listen.port", "0", "--llm_proxy.telemetry.log_format", "json",
        *flags, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert started.stderr is not None
    try:
        async with asyncio.timeout(SECONDS):
            while b'"serving"' not in (line := await started.stderr.readline()):
                assert line, "llm_proxy ended"
        address = line.decode().partition('"address": "')[2].partition('"')[0]
        async with rpc.channel(address) as channel:
            yield started, Proxy(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), None)  # pyright: ignore[reportArgumentType]
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def test_it_serves_and_on_sigterm_ends_at_once_though_streams_and_long_polls_are_open() -> None:
    engine = SimulatedEngine()
    async with (
        engine.serve() as address,
        process("--llm_proxy.engines", address, "--llm_proxy.listen.drain_seconds", "60") as (llm_proxy, proxy),
    ):
        listed = await proxy.serving()
        polling = asyncio.create_task(proxy.list_engines(after_revision=listed.revision))
        call = proxy.stub.GenerateMany(timeout=SECONDS)
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=[asked("a")]))
        assert_exact((await call.read()).results[0])

        llm_proxy.send_signal(signal.SIGTERM)

        assert await asyncio.wait_for(llm_proxy.wait(), 10) == 0
        assert (await polling).revision == listed.revision
