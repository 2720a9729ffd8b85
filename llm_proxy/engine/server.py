"""EngineService over one adapter.

Each Generate stream owns its requests: their keys carry the stream's number, and whatever is open when the stream ends
is cancelled. Chunks that follow each other closely are sent together.
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog
from grpc import aio

from llm_proxy.engine.adapters import Adapter
from llm_proxy.engine.metrics import PAUSE_SECONDS
from llm_proxy.engine.requests import Chunk, Request, decode
from rollfarm import rpc, times
from rollfarm.errors import FarmError, InvalidArgument
from rollfarm.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger()

Context = aio.ServicerContext[Any, Any]

SERVICE = "rollfarm.v1.EngineService"


class _Stream:
    """One Generate call: its open requests, and chunks to send."""

    def __init__(self, number: int) -> None:
        self.prefix = f"{number}/"
        self.open: set[str] = set()
        self.changed = asyncio.Event()
        self._chunks: list[engine_pb2.GenerationChunk] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open and nothing waits to be sent."""
        return not self.open and not self._chunks

    def put(self, chunk: Chunk) -> None:
        """Send a chunk with what else waits."""
        if chunk.is_last:
            self.open.discard(chunk.key)
        self._send(chunk)

    def refuse(self, key: str, failure: FarmError) -> None:
        """Answer a request that was not begun. One that is open under the same key goes on."""
        self._send(Chunk(key, failure=failure))

    def _send(self, chunk: Chunk) -> None:
        self._chunks.append(chunk.to_proto(chunk.key.removeprefix(self.prefix)))
        self.changed.set()

    def take(self) -> list[engine_pb2.GenerationChunk]:
        """All that waits."""
        self.changed.clear()
        chunks, self._chunks = self._chunks, []
        return chunks


def _response(chunks: list[engine_pb2.GenerationChunk]) -> engine_pb2.EngineServiceGenerateResponse:
    return engine_pb2.EngineServiceGenerateResponse(chunks=chunks)


def _size(response: engine_pb2.EngineServiceGenerateResponse) -> int:
    return response.ByteSize()


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Adapts gRPC to an Adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._instance_id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._streams: dict[str, _Stream] = {}

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """What the adapter calls: give each chunk to its stream. A stream that has gone needs none."""
        for chunk in chunks:
            stream = self._streams.get(chunk.key.partition("/")[0] + "/")
            if stream is not None:
                stream.put(chunk)

    async def Generate(
        self, request_iterator: AsyncIterator[engine_pb2.EngineServiceGenerateRequest], context: Context
    ) -> AsyncIterator[engine_pb2.EngineServiceGenerateResponse]:
        stream = _Stream(next(self._numbers))
        self._streams[stream.prefix] = stream
        ended, pace = asyncio.Event(), rpc.Pace()
        reading = asyncio.create_task(self._read(request_iterator, stream, ended), name="engine-requests")
        try:
            while not (ended.is_set() and stream.is_idle):
                await stream.changed.wait()
                await pace.wait()
                if chunks := stream.take():
                    pace.sent(len(chunks))
                    for response in rpc.fitted(_response, _size, chunks):
                        yield response
            await reading
        finally:
            reading.cancel()
            del self._streams[stream.prefix]
            self._adapter.cancel(list(stream.open))

    async def _read(
        self,
        requests: AsyncIterator[engine_pb2.EngineServiceGenerateRequest],
        stream: _Stream,
        ended: asyncio.Event,
    ) -> None:
        try:
            async for message in requests:
                self._submit(stream, message.generations)
        finally:
            ended.set()
            stream.changed.set()

    def _submit(self, stream: _Stream, generations: Sequence[engine_pb2.Generation]) -> None:
        accepted: list[Request] = []
        for generation in generations:
            key = stream.prefix + generation.request_id
            try:
                if key in stream.open:
                    raise InvalidArgument(
                        f"Request {generation.request_id} is open already.", request_id=generation.request_id
                    )
                accepted.append(decode(generation, key, self._adapter.limits))
                stream.open.add(key)
            except FarmError as failure:
                log.debug(
                    "generation refused",
                    request_id=generation.request_id,
                    trace_id=generation.trace_id,
                    cause=str(failure),
                )
                stream.refuse(key, failure)
        if accepted:
            self._adapter.submit(accepted)

    async def Cancel(
        self, request: engine_pb2.EngineServiceCancelRequest, context: Context
    ) -> engine_pb2.EngineServiceCancelResponse:
        self._adapter.cancel(
            [
                key
                for stream in self._streams.values()
                for request_id in request.request_ids
                if (key := stream.prefix + request_id) in stream.open
            ]
        )
        return engine_pb2.EngineServiceCancelResponse()

    async def Pause(
        self, request: engine_pb2.EngineServicePauseRequest, context: Context
    ) -> engine_pb2.EngineServicePauseResponse:
        await self._adapter.pause()
        return engine_pb2.EngineServicePauseResponse()

    async def Resume(
        self, request: engine_pb2.EngineServiceResumeRequest, context: Context
    ) -> engine_pb2.EngineServiceResumeResponse:
        await self._adapter.resume()
        return engine_pb2.EngineServiceResumeResponse()

    async def JoinWeights(
        self, request: engine_pb2.JoinWeightsRequest, context: Context
    ) -> engine_pb2.JoinWeightsResponse:
        await self._adapter.join_weights(request.group)
        log.info("weight group joined", group=request.group.group_name)
        return engine_pb2.JoinWeightsResponse()

    async def StageWeights(
        self, request: engine_pb2.StageWeightsRequest, context: Context
    ) -> engine_pb2.StageWeightsResponse:
        size = await self._adapter.stage_weights(request)
        log.info("weights staged", policy_version=request.policy_version, bytes=size)
        return engine_pb2.StageWeightsResponse(size_bytes=size)

    async def ApplyWeights(
        self, request: engine_pb2.ApplyWeightsRequest, context: Context
    ) -> engine_pb2.ApplyWeightsResponse:
        mode = request.mode or engine_pb2.UPDATE_MODE_KEEP
        seconds = await self._adapter.apply_weights(request.policy_version, mode)
        PAUSE_SECONDS.observe(seconds)
        log.info("weights applied", policy_version=request.policy_version, pause_s=round(seconds, 4))
        return engine_pb2.ApplyWeightsResponse(pause_duration=times.duration(seconds))

    async def DiscardWeights(
        self, request: engine_pb2.DiscardWeightsRequest, context: Context
    ) -> engine_pb2.DiscardWeightsResponse:
        await self._adapter.discard_weights(request.policy_version)
        return engine_pb2.DiscardWeightsResponse()

    async def Sleep(self, request: engine_pb2.SleepRequest, context: Context) -> engine_pb2.SleepResponse:
        await self._adapter.sleep(discard_weights=request.discard_weights)
        log.info("engine sleeps", weights_discarded=request.discard_weights)
        return engine_pb2.SleepResponse()

    async def WakeUp(self, request: engine_pb2.WakeUpRequest, context: Context) -> engine_pb2.WakeUpResponse:
        await self._adapter.wake_up()
        log.info("engine awake", has_weights=not self._adapter.status().sleeping)
        return engine_pb2.WakeUpResponse()

    async def GetStatus(
        self, request: engine_pb2.EngineServiceGetStatusRequest, context: Context
    ) -> engine_pb2.EngineServiceGetStatusResponse:
        await self._adapter.check()
        status = self._adapter.status()
        limits = self._adapter.limits
        return engine_pb2.EngineServiceGetStatusResponse(
            instance_id=self._instance_id,
            adapter=self._adapter.name,
            policy_version=status.policy_version,
            slot_count=limits.slot_count,
            context_token_count=limits.context_token_count,
            vocabulary_size=limits.vocabulary_size,
            running_count=status.running_count,
            waiting_count=status.waiting_count,
            generated_token_count=status.generated_token_count,
            paused=status.paused,
            kv_cache_usage=status.kv_cache_usage,
            server_version=status.server_version,
            sleeping=status.sleeping,
        )
