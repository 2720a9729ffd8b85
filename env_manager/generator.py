"""One bidirectional stream to llm_proxy, shared by every episode.

Requests of one turn of the event loop travel in one message, or in a few where they are long. Invariant: an open
request is either unsent or was sent on the stream that is alive now. So when a stream breaks, every open request is
sent again on the next one, under its own request_id, which llm_proxy recognises.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc
import prometheus_client
import structlog
from grpc import aio

from rollfarm import rpc
from rollfarm.error_wire import from_failure, from_rpc
from rollfarm.errors import FarmError
from rollfarm.v1 import llm_proxy_pb2

log = structlog.get_logger()

CANCEL_SECONDS = 5.0
"""How long llm_proxy may take to acknowledge a cancellation. Without it the slot is freed late, and no more."""

BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""How a stream ends when its server restarts or the network is cut. Any other status is a bug."""

RECONNECTS = prometheus_client.Counter(
    "rollfarm_env_manager_proxy_reconnects_total", "Streams to llm_proxy that broke and were opened again."
)
OPEN = prometheus_client.Gauge(
    "rollfarm_env_manager_open_generations", "Generations asked of llm_proxy and not answered."
)


@dataclass(slots=True)
class _Open:
    generation: llm_proxy_pb2.ProxiedGeneration
    result: asyncio.Future[llm_proxy_pb2.GenerationResult]
    end: float
    """When the loop's clock says that it is waited for no longer."""


class Generator:
    """Asks llm_proxy for tokens while `run` runs."""

    def __init__(self, stub: Any, *, seconds: float) -> None:
        """`stub` is an LlmProxyServiceStub on an aio channel; a generation may take `seconds`, waiting included."""
        self._stub = stub
        self._seconds = seconds
        self._call: Any = None
        self._open: dict[str, _Open] = {}
        """In the order in which they were asked for, and so will be late."""
        self._unsent: list[llm_proxy_pb2.ProxiedGeneration] = []
        self._unwanted: list[str] = []
        self._sendable = asyncio.Event()
        self._cancellable = asyncio.Event()
        self._backoff = rpc.FIRST_RETRY_SECONDS
        OPEN.set_function(lambda: len(self._open))

    async def generate(self, generation: llm_proxy_pb2.ProxiedGeneration) -> llm_proxy_pb2.GenerationResult:
        """The finished generation. Cancelling the caller cancels it. Raises the FarmError that llm_proxy answered, and
        TimeoutError."""
        request_id, loop = generation.generation.request_id, asyncio.get_running_loop()
        result: asyncio.Future[llm_proxy_pb2.GenerationResult] = loop.create_future()
        self._open[request_id] = _Open(generation, result, loop.time() + self._seconds)
        self._unsent.append(generation)
        self._sendable.set()
        try:
            answer = await result
        finally:
            if self._open.pop(request_id, None) is not None:
                self._unwanted.append(request_id)
                self._cancellable.set()
        if answer.HasField("failure"):
            raise from_failure(answer.failure)
        return answer

    async def run(self) -> None:
        """Keep the stream alive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._cancel())
            group.create_task(self._expire())
            while True:
                cause = await self._stream()
                log.warning("stream to llm_proxy broke", open=len(self._open), cause=cause)
                RECONNECTS.inc()
                await asyncio.sleep(self._backoff)
                self._backoff = min(2 * self._backoff, rpc.LAST_RETRY_SECONDS)

    async def _stream(self) -> str:
        """Use one stream until it breaks; returns why."""
        call = self._call = self._stub.GenerateMany(metadata=rpc.metadata(), wait_for_ready=True)
        self._unsent = [each.generation for each in self._open.values()]
        self._sendable.set()
        try:
            async for response in call:
                self._take(response)
            return "llm_proxy ended it"
        except aio.AioRpcError as broken:
            if broken.code() not in BROKEN:
                raise from_rpc(broken) from None
            return str(from_rpc(broken))
        except BaseException:
            call.cancel()
            raise

    def _take(self, response: llm_proxy_pb2.GenerateManyResponse) -> None:
        self._backoff = rpc.FIRST_RETRY_SECONDS
        for result in response.results:
            # A result of a request that was cancelled, or answered before, has nobody waiting.
            waiting = self._open.pop(result.request_id, None)
            if waiting is not None and not waiting.result.done():
                waiting.result.set_result(result)

    async def _send(self) -> None:
        while True:
            await self._sendable.wait()
            self._sendable.clear()
            # Requests of callers that gave up meanwhile are not worth sending.
            wanted = [each for each in self._unsent if each.generation.request_id in self._open]
            self._unsent = []
            call = self._call
            # When the stream breaks under it, `_stream` opens another and has everything open sent again.
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                for portion in rpc.portions(wanted):
                    await call.write(llm_proxy_pb2.GenerateManyRequest(generations=portion))

    async def _expire(self) -> None:
        """Give up what is late. One timer serves all: none that is asked for while it sleeps can be late before."""
        loop = asyncio.get_running_loop()
        while True:
            first = next(iter(self._open.values()), None)
            await asyncio.sleep(first.end - loop.time() if first else self._seconds)
            for each in self._open.values():
                if each.end > loop.time():
                    break
                if not each.result.done():
                    each.result.set_exception(TimeoutError(f"No generation in {self._seconds:g} s."))

    async def _cancel(self) -> None:
        """Tell llm_proxy what nobody waits for any more."""
        while True:
            await self._cancellable.wait()
            self._cancellable.clear()
            request = llm_proxy_pb2.CancelRequest(request_ids=self._unwanted)
            self._unwanted = []
            try:
                await rpc.call(self._stub.Cancel, request, timeout=CANCEL_SECONDS)
            except FarmError as error:
                log.debug("generations not cancelled", count=len(request.request_ids), cause=str(error))
