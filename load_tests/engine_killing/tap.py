"""Taps between llm_proxy and its engines: each passes every call on unchanged, and notes who generates what and when.

A tap runs in the auditor's process, so it outlives every kill. An engine that dies cuts its streams as if there were no
tap; requests are told apart by their trace, which llm_proxy passes on.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from load_tests.engine_killing.evidence import Attempt, Evidence, Progress
from rollfarm import rpc
from rollfarm.v1 import engine_pb2

Context = aio.ServicerContext[Any, Any]


class Tap(grpc.GenericRpcHandler):
    """Serves whatever the engine at `address` serves."""

    def __init__(self, engine: int, address: str, evidence: Evidence) -> None:
        self._engine = engine
        self._address = address
        self._evidence = evidence
        self._upstream: aio.Channel | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        path = handler_call_details.method
        if path.endswith("/Generate"):
            return grpc.stream_stream_rpc_method_handler(self._stream(path))  # pyright: ignore[reportArgumentType]
        return grpc.unary_unary_rpc_method_handler(self._call(path))  # pyright: ignore[reportArgumentType]

    def _channel(self) -> aio.Channel:
        if self._upstream is None:
            self._upstream = rpc.channel(self._address)
        return self._upstream

    async def _refuse(self, context: Context, refused: aio.AioRpcError) -> None:
        """As the engine did. A channel that lost its engine is not used again: a new one connects without waiting."""
        trailing = tuple(refused.trailing_metadata() or ())
        is_the_engines_word = any(name == "grpc-status-details-bin" for name, _ in trailing)
        if refused.code() == grpc.StatusCode.UNAVAILABLE and not is_the_engines_word:
            self._upstream = None
        await context.abort(refused.code(), refused.details() or "", trailing)

    def _call(self, path: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def call(request: bytes, context: Context) -> bytes:
            try:
                return await self._channel().unary_unary(path)(request, timeout=context.time_remaining())
            except aio.AioRpcError as refused:
                await self._refuse(context, refused)
                raise

        return call

    def _stream(self, path: str) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]:
        async def call(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            upstream = self._channel().stream_stream(path)()
            attempts: dict[str, Attempt] = {}
            forwarding = asyncio.create_task(self._forward(requests, upstream, attempts))
            try:
                async for answer in upstream:
                    self._note(answer, attempts)
                    yield answer
            except aio.AioRpcError as refused:
                await self._refuse(context, refused)
            finally:
                forwarding.cancel()
                upstream.cancel()
                for attempt in attempts.values():
                    attempt.ended_at = time.monotonic()

        return call

    async def _forward(self, requests: AsyncIterator[bytes], upstream: Any, attempts: dict[str, Attempt]) -> None:
        # A stream that broke is seen by whoever reads it.
        with contextlib.suppress(asyncio.InvalidStateError, aio.AioRpcError):
            async for message in requests:
                now = time.monotonic()
                for generation in engine_pb2.EngineServiceGenerateRequest.FromString(message).generations:
                    attempt = Attempt(generation.trace_id, self._engine, now)
                    attempts[generation.request_id] = attempt
                    self._evidence.attempts.append(attempt)
                await upstream.write(message)
            await upstream.done_writing()

    def _note(self, answer: bytes, attempts: dict[str, Attempt]) -> None:
        now = time.monotonic()
        for chunk in engine_pb2.EngineServiceGenerateResponse.FromString(answer).chunks:
            attempt = attempts[chunk.request_id]
            if chunk.version_spans:
                claimed = [span.policy_version for span in chunk.version_spans]
                attempt.tokens += sum(span.token_count for span in chunk.version_spans)
                before = [] if attempt.oldest_version is None else [attempt.oldest_version]
                attempt.oldest_version = min(claimed + before)
                self._evidence.progress.append(Progress(now, attempt))
            if chunk.finish_reason or chunk.HasField("failure"):
                attempts.pop(chunk.request_id).ended_at = now
        self._evidence.changed.notify()


async def serve(tap: Tap) -> tuple[aio.Server, str]:
    """A server of the tap that has started, and its address."""
    server = aio.server(options=[*rpc.MESSAGE_OPTIONS, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((tap,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
