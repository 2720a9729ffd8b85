"""OpenEnv's client, one connection a session, as its template has it. Runs in OpenEnv's own environment.

`python -m load_tests.stepping.openenv_client fast|default`: fast is with uvloop on both ends, the newest of uvicorn's
WebSocket implementations, and messages that are not compressed; default is as the template starts a server.
"""

# pyright: reportMissingImports=false

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from load_tests.stepping import flow
from load_tests.stepping.flow import Order, Step
from load_tests.stepping.openenv_server import EchoAction, EchoObservation

APP = "load_tests.stepping.openenv_server:app"
FLAGS = {
    "fast": ("--loop", "uvloop", "--ws", "websockets-sansio", "--ws-per-message-deflate", "false"),
    "default": ("--loop", "asyncio"),
}
START_SECONDS = 60.0


class EchoEnv(EnvClient[EchoAction, EchoObservation, dict[str, Any]]):
    """One session."""

    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        shown = payload.get("observation", {})
        observation = EchoObservation(
            text=shown.get("text", ""), done=payload.get("done", False), reward=payload.get("reward")
        )
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


async def main(servers: dict[bool, tuple[str, int]]) -> None:
    """`servers` are the addresses and processes by whether they play in threads."""

    @asynccontextmanager
    async def opened(order: Order) -> AsyncIterator[tuple[Sequence[Step], int]]:
        url, server = servers[order.threads]
        async with AsyncExitStack() as sessions:
            steps: list[Step] = []
            for _ in range(order.sessions):
                session = await sessions.enter_async_context(EchoEnv(base_url=url))
                await session.reset(chars=order.chars)
                steps.append(partial(session.step, EchoAction(message=flow.ACTION)))
            yield steps, server

    await flow.obey(opened)


@contextmanager
def serving(kind: str, echo: str, port: int) -> Iterator[tuple[str, int]]:
    """A server's address and process."""
    command = [sys.executable, "-m", "uvicorn", APP, "--host", "127.0.0.1", "--port", str(port), *FLAGS[kind]]
    environment = {**os.environ, "ECHO": echo}
    with subprocess.Popen([*command, "--log-level", "error"], env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            asyncio.run(_listens(port))
            yield f"ws://127.0.0.1:{port}", server.pid
        finally:
            server.kill()


async def _listens(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


if __name__ == "__main__":
    kind, *ports = sys.argv[1:]
    with serving(kind, "loop", int(ports[0])) as on_loop, serving(kind, "thread", int(ports[1])) as in_threads:
        playing = main({False: on_loop, True: in_threads})
        if kind == "fast":
            import uvloop

            uvloop.run(playing)
        else:
            asyncio.run(playing)
