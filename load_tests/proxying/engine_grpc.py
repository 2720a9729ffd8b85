"""An engine host without an engine: answers every request with the same tokens, at once or after an exact time.

python -m load_tests.proxying.engine_grpc PORT SECONDS
"""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

from load_tests.proxying import payload
from rollfarm import rpc
from rollfarm.v1 import engine_pb2 as pb
from rollfarm.v1 import llm_proxy_pb2

PROXY_SERVICE = llm_proxy_pb2.DESCRIPTOR.services_by_name["LlmProxyService"].full_name
SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"].full_name
SLOTS = 1_000_000
"""More than are ever asked: nothing waits in llm_proxy's queue."""


class Engine:
    """The calls of EngineService that llm_proxy makes when no weights change."""

    def __init__(self, seconds: float) -> None:
        """Seconds from a request's arrival to its answer; 0 is at once."""
        self._seconds = seconds

    async def generate(self, requests: AsyncIterator[pb.EngineServiceGenerateRequest], _: Any) -> AsyncIterator[bytes]:
        if not self._seconds:
            async for request in requests:
                yield payload.chunks(request)
            return
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        reading = asyncio.create_task(self._read(requests, due))
        try:
            while True:
                at, answer = await due.get()
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                yield answer
        finally:
            reading.cancel()

    async def _read(
        self, requests: AsyncIterator[pb.EngineServiceGenerateRequest], due: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        async for request in requests:
            at = asyncio.get_running_loop().time() + self._seconds
            due.put_nowait((at, payload.chunks(request)))

    async def floor(self, request: llm_proxy_pb2.GenerateRequest, _: Any) -> bytes:
        """LlmProxyService's Generate by a server that does nothing: what gRPC costs in Python without llm_proxy."""
        return payload.unary_answer(request.generation.generation.request_id)

    async def get_status(self, _: pb.EngineServiceGetStatusRequest, __: Any) -> pb.EngineServiceGetStatusResponse:
        return pb.EngineServiceGetStatusResponse(
            instance_id="load",
            adapter="load",
            slot_count=SLOTS,
            context_token_count=payload.CONTEXT_TOKENS,
            vocabulary_size=payload.VOCABULARY,
        )


async def serve(port: int, seconds: float) -> None:
    """Serve until killed. The answers of Generate are bytes already."""
    engine = Engine(seconds)
    handlers = {
        "Generate": grpc.stream_stream_rpc_method_handler(
            engine.generate,  # pyright: ignore[reportArgumentType]
            request_deserializer=pb.EngineServiceGenerateRequest.FromString,
        ),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            engine.get_status,  # pyright: ignore[reportArgumentType]
            request_deserializer=pb.EngineServiceGetStatusRequest.FromString,
            response_serializer=pb.EngineServiceGetStatusResponse.SerializeToString,
        ),
    }
    floor = {
        "Generate": grpc.unary_unary_rpc_method_handler(
            engine.floor,  # pyright: ignore[reportArgumentType]
            request_deserializer=llm_proxy_pb2.GenerateRequest.FromString,
        )
    }
    server = aio.server(options=rpc.MESSAGE_OPTIONS)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, handlers),
            grpc.method_handlers_generic_handler(PROXY_SERVICE, floor),
        )
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    gc.disable()
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
