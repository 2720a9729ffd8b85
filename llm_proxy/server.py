"""LlmProxyService over the fleet: decode, make a transition for each request, let the fleet carry it out, encode.

A GenerateMany stream costs two tasks however many requests are open on it; results that are ready in one loop turn
travel in one message.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from grpc import aio

from llm_proxy.engines import Fleet
from llm_proxy.pool import EngineState
from llm_proxy.requests import OpenRequest, write_refusal
from llm_proxy.sleeping import Sleeping
from llm_proxy.tenants import Tenant
from llm_proxy.validation import check
from llm_proxy.weights import WeightUpdates
from rollfarm import rpc
from rollfarm.error_wire import from_failure
from rollfarm.errors import FarmError, HttpDisabled, InvalidArgument
from rollfarm.service import Bell, poll_seconds
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc

if TYPE_CHECKING:
    from llm_proxy.front.wiring import Front

log = structlog.get_logger()

SERVICE = llm_proxy_pb2.DESCRIPTOR.services_by_name["LlmProxyService"].full_name

Context = aio.ServicerContext[Any, Any]
Result = llm_proxy_pb2.GenerationResult
ManyResponse = llm_proxy_pb2.GenerateManyResponse


class Once:
    """Waits for the one result of a unary call."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def answer(self, request: OpenRequest) -> None:
        if not self.result.done():
            self.result.set_result(request.result())


class Stream:
    """Waits for the results of one GenerateMany call."""

    def __init__(self) -> None:
        self.open: set[OpenRequest] = set()
        """Requests that it still waits for."""

        self.is_complete = False
        """The caller will add no more."""

        self._ready = ManyResponse()
        self._news = Bell()

    def answer(self, request: OpenRequest) -> None:
        self.open.discard(request)
        request.write_result(self._ready.results.add())
        self._news.ring()

    def refuse(self, request_id: str, error: FarmError) -> None:
        """Answer a request that was never opened; an open one of the same id is another matter."""
        write_refusal(self._ready.results.add(), request_id, error)
        self._news.ring()

    def complete(self) -> None:
        self.is_complete = True
        self._news.ring()

    async def ready(self) -> list[ManyResponse]:
        """Results since the last call, once there is one; nothing when the last was given."""
        while not self._ready.results and not (self.is_complete and not self.open):
            await self._news.rung()
        ready, self._ready = self._ready, ManyResponse()
        if len(ready.results) <= 1 or ready.ByteSize() <= rpc.CHUNK_BYTES:
            return [ready] if ready.results else []
        return [ManyResponse(results=portion) for portion in rpc.portions(ready.results, rpc.CHUNK_BYTES)]


class LlmProxyServicer(llm_proxy_pb2_grpc.LlmProxyServiceServicer):
    """gRPC to transitions and back."""

    def __init__(self, fleet: Fleet, stop: asyncio.Event, front: "Front | None" = None) -> None:
        """`stop` is set when the service is to drain; `front` serves agents, where they are served."""
        self._front_door = front
        self._fleet = fleet
        self._router = fleet.router
        self._weights = WeightUpdates(fleet)
        self._sleeping = Sleeping(fleet)
        self._stop = stop
        self._readers: set[asyncio.Task[None]] = set()

    async def watch_sleep(self) -> None:
        """Let engines sleep and wake as is wanted, until cancelled."""
        await self._sleeping.run()

    async def wake_on_stop(self) -> None:
        """When the service stops, let long polls answer and streams end with their open requests.

        What is read no more, the client sends again to whoever serves next.
        """
        await self._stop.wait()
        self._fleet.changed.notify()
        for reading in self._readers:
            reading.cancel()

    async def Generate(self, request: llm_proxy_pb2.GenerateRequest, context: Context) -> Any:
        once, router = Once(), self._router
        check(request.generation, context_tokens=router.context_tokens, vocabulary_size=router.vocabulary_size)
        router.submit(request.generation, once, time.monotonic())
        self._fleet.wake()
        try:
            result = await once.result
        except asyncio.CancelledError:
            router.withdraw(request.generation.generation.request_id, once, time.monotonic())
            self._fleet.wake()
            raise
        if result.HasField("failure"):
            raise from_failure(result.failure)
        return llm_proxy_pb2.GenerateResponse(result=result)

    async def GenerateMany(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        stream = Stream()
        reading = asyncio.create_task(self._read(request_iterator, stream))
        self._readers.add(reading)
        reading.add_done_callback(self._readers.discard)
        reading.add_done_callback(lambda _: stream.complete())
        if self._stop.is_set():
            reading.cancel()
        try:
            while ready := await stream.ready():
                for response in ready:
                    yield response
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            now = time.monotonic()
            for request in list(stream.open):
                self._router.withdraw(request.request_id, stream, now)
            self._fleet.wake()

    async def Cancel(self, request: llm_proxy_pb2.CancelRequest, context: Context) -> Any:
        now = time.monotonic()
        for request_id in request.request_ids:
            self._router.cancel(request_id, now)
        self._fleet.wake()
        return llm_proxy_pb2.CancelResponse()

    async def AttachEngine(self, request: llm_proxy_pb2.AttachEngineRequest, context: Context) -> Any:
        host, _, port = request.address.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidArgument(f"{request.address!r} is not host:port.", address=request.address)
        return llm_proxy_pb2.AttachEngineResponse(engine_id=self._fleet.attach(request.address))

    async def DetachEngine(self, request: llm_proxy_pb2.DetachEngineRequest, context: Context) -> Any:
        if request.drain:
            self._fleet.drain(request.engine_id)
        else:
            self._fleet.detach(request.engine_id)
        return llm_proxy_pb2.DetachEngineResponse()

    async def ListEngines(self, request: llm_proxy_pb2.ListEnginesRequest, context: Context) -> Any:
        if request.HasField("after_revision"):
            await self._fleet.changed.first(lambda: self._is_news(request.after_revision), poll_seconds(context))
        return llm_proxy_pb2.ListEnginesResponse(
            engines=[_engine(engine) for engine in self._router.engines],
            revision=self._router.revision,
            policy_version=self._router.policy_version,
        )

    async def BeginWeightUpdate(self, request: llm_proxy_pb2.BeginWeightUpdateRequest, context: Context) -> Any:
        return await self._weights.begin(request)

    async def CommitWeightUpdate(self, request: llm_proxy_pb2.CommitWeightUpdateRequest, context: Context) -> Any:
        return await self._weights.commit(request)

    async def AbortWeightUpdate(self, request: llm_proxy_pb2.AbortWeightUpdateRequest, context: Context) -> Any:
        await self._weights.abort(request.policy_version)
        return llm_proxy_pb2.AbortWeightUpdateResponse()

    async def SleepEngines(self, request: llm_proxy_pb2.SleepEnginesRequest, context: Context) -> Any:
        return await self._sleeping.sleep(request)

    async def WakeEngines(self, request: llm_proxy_pb2.WakeEnginesRequest, context: Context) -> Any:
        return await self._sleeping.wake()

    async def OpenSession(self, request: llm_proxy_pb2.OpenSessionRequest, context: Context) -> Any:
        return self._front.open(request)

    async def GetSession(self, request: llm_proxy_pb2.GetSessionRequest, context: Context) -> Any:
        return llm_proxy_pb2.GetSessionResponse(record=self._front.get(request.session_id))

    async def CloseSession(self, request: llm_proxy_pb2.CloseSessionRequest, context: Context) -> Any:
        return llm_proxy_pb2.CloseSessionResponse(record=self._front.close(request.session_id))

    async def GetStatus(self, request: llm_proxy_pb2.LlmProxyServiceGetStatusRequest, context: Context) -> Any:
        router = self._router
        return llm_proxy_pb2.LlmProxyServiceGetStatusResponse(
            queued_count=router.waiting_count,
            running_count=router.running_count,
            engines=[_engine(engine) for engine in router.engines],
            policy_version=router.policy_version,
            generated_token_count=router.generated_count,
            finished_count=router.finished_count,
            gate_closed=router.gate_closed,
            resumption_count=router.resumption_count,
            tenants=[_tenant(tenant) for tenant in router.tenants],
            session_count=self._front_door.sessions.open_count if self._front_door else 0,
        )

    @property
    def _front(self) -> "Front":
        """Raises HttpDisabled."""
        if self._front_door is None:
            raise HttpDisabled("This llm_proxy serves no HTTP.")
        return self._front_door

    def _is_news(self, revision: int) -> bool | None:
        """Unequal, not greater: a revision from before a restart of llm_proxy is not waited for."""
        return True if self._router.revision != revision or self._stop.is_set() else None

    async def _read(self, request_iterator: AsyncIterator[Any], stream: Stream) -> None:
        async for message in request_iterator:
            self._submit_all(message.generations, stream, time.monotonic())
            self._fleet.flush()

    def _submit_all(self, asked: Sequence[llm_proxy_pb2.ProxiedGeneration], stream: Stream, now: float) -> None:
        """Open those that an engine could serve, and refuse the others."""
        router = self._router
        context_tokens, vocabulary_size = router.context_tokens, router.vocabulary_size
        for one in asked:
            try:
                check(one, context_tokens=context_tokens, vocabulary_size=vocabulary_size)
                stream.open.add(router.submit(one, stream, now))
            except FarmError as error:
                request_id, trace_id = one.generation.request_id, one.generation.trace_id
                log.debug("generation refused", request_id=request_id, trace_id=trace_id, cause=str(error))
                stream.refuse(request_id, error)


def _engine(engine: EngineState) -> llm_proxy_pb2.Engine:
    return llm_proxy_pb2.Engine(
        engine_id=engine.engine_id,
        address=engine.address,
        instance_id=engine.status.instance_id,
        state=engine.state,
        policy_version=engine.version,
        slot_count=engine.status.slot_count,
        running_count=len(engine.attempts),
        generated_token_count=engine.generated,
        adapter=engine.status.adapter,
        detail=engine.detail,
        server_version=engine.status.server_version,
        decoding_count=engine.status.running_count,
        waiting_count=engine.status.waiting_count,
        kv_cache_usage=engine.status.kv_cache_usage,
        tokens_per_second=engine.tokens_per_second,
        sleeping=engine.status.sleeping,
    )


def _tenant(tenant: Tenant) -> llm_proxy_pb2.TenantStatus:
    return llm_proxy_pb2.TenantStatus(
        tenant=tenant.name,
        queued_count=tenant.waiting_count,
        running_count=tenant.open_count - tenant.waiting_count,
    )
