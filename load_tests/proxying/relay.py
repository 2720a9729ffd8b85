"""Between a client and an engine, and nothing more: passes the messages of their stream on, unread.

python -m load_tests.proxying.relay PORT ENGINE_PORT

What it adds is gRPC in Python and the machine's waking up. As llm_proxy it runs on uvloop, where that is installed.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from grpc import aio

from load_tests.proxying.engine_grpc import SERVICE
from rollfarm import rpc, service


async def generate(channel: aio.Channel, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    """EngineService's Generate, by the engine."""
    call: Any = channel.stream_stream(f"/{SERVICE}/Generate")()
    sending = asyncio.create_task(send(call, requests))
    try:
        async for answer in call:
            yield answer
    finally:
        sending.cancel()
        call.cancel()


async def send(call: Any, requests: AsyncIterator[bytes]) -> None:
    async for request in requests:
        await call.write(request)


async def serve(port: int, engine_port: int) -> None:
    """Serve until killed."""
    async with rpc.channel(f"127.0.0.1:{engine_port}") as channel:
        handler = grpc.stream_stream_rpc_method_handler(partial(generate, channel))  # pyright: ignore[reportArgumentType]
        server = aio.server(options=rpc.MESSAGE_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()


if __name__ == "__main__":
    gc.disable()
    service.run(partial(serve, int(sys.argv[1]), int(sys.argv[2])), quick=True)
