"""Steps of many episodes on one server, that travel together.

The stream is a faster way, and no other one: what it does not answer, for whichever reason, is asked by a call of its
own. So it is never waited for, and nothing of it is tried again.
"""

import asyncio
import contextlib
from typing import Any

import grpc
import structlog
from grpc import aio

from rollfarm import rpc
from rollfarm.env_steps import MESSAGE_STEPS
from rollfarm.error_wire import from_failure, from_rpc
from rollfarm.errors import DeadlineExceeded
from rollfarm.v1.environment_pb2 import StepManyRequest, StepRequest, StepResponse, StepResult

log = structlog.get_logger()


class Steps:
    """The stream to one server, while `run` runs."""

    def __init__(self, server: str, stub: Any) -> None:
        """`stub` is an EnvironmentServiceStub on an aio channel to `server`."""
        self._server = server
        self._stub = stub
        self.is_open = False
        """Whether steps travel together now."""
        self._waiting: dict[tuple[str, int], asyncio.Future[StepResult | None]] = {}
        self._unsent: list[StepRequest] = []
        self._sendable = asyncio.Event()

    async def ask(self, request: StepRequest, seconds: float) -> StepResponse | None:
        """The answer; None when there is no stream, or it breaks. Raises what the server did, and DeadlineExceeded."""
        if not self.is_open:
            return None
        name = request.session_id, request.step
        waiting = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._unsent.append(request)
        self._sendable.set()
        try:
            async with asyncio.timeout(seconds):
                result = await waiting
        except TimeoutError:
            raise DeadlineExceeded(f"No answer to a step in {seconds:g} s.", seconds=seconds) from None
        finally:
            self._waiting.pop(name, None)
        if result is None:
            return None
        if result.HasField("failure"):
            raise from_failure(result.failure)
        return result.answer

    async def run(self) -> None:
        """Keep a stream open until cancelled, or until the server says that it has none."""
        backoff = rpc.FIRST_RETRY_SECONDS
        while True:
            call = self._stub.StepMany(metadata=rpc.metadata(), wait_for_ready=True)
            try:
                await call.wait_for_connection()
                self.is_open, backoff = True, rpc.FIRST_RETRY_SECONDS
                cause = await self._carry(call)
            except aio.AioRpcError as broken:
                if broken.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
                cause = str(from_rpc(broken))
            finally:
                call.cancel()
                self._drop()
            log.info("stream of steps broke", server=self._server, cause=cause)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, rpc.LAST_RETRY_SECONDS)

    async def _carry(self, call: Any) -> str:
        """Until the stream ends; returns why. Raises AioRpcError."""
        sending = asyncio.create_task(self._send(call))
        try:
            async for message in call:
                if message is None:  # gRPC's way to say that it could not parse
                    return "An answer is no valid message; text is UTF-8."
                for result in message.results:
                    waiting = self._waiting.get((result.session_id, result.step))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(result)
            return "The server ended it."
        finally:
            sending.cancel()

    async def _send(self, call: Any) -> None:
        # When the stream breaks under it, `_carry` ends, and whoever waits asks otherwise.
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._sendable.wait()
                self._sendable.clear()
                unsent, self._unsent = self._unsent, []
                for steps in rpc.portions(unsent, most=MESSAGE_STEPS):
                    await call.write(StepManyRequest(steps=steps))

    def _drop(self) -> None:
        """Let everybody ask otherwise."""
        self.is_open, self._unsent = False, []
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)
