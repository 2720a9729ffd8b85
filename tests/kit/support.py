"""A server of the kit on a real socket, in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollfarm.config import Listen
from rollfarm.service import Register, serve

LOOPBACK = Listen()


@asynccontextmanager
async def serving(register: Register, listen: Listen = LOOPBACK) -> AsyncIterator[str]:
    """Serve and yield host:port. Leaving drains, as SIGTERM would."""
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(register, listen, services=[], stop=stop, started=port.set_result))
    await asyncio.wait([server, port], return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        await server
    try:
        yield f"{listen.host}:{port.result()}"
    finally:
        stop.set()
        await server
