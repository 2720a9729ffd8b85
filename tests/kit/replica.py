"""`python -m tests.kit.replica NAME`: a replica as a process of its own; prints its port."""

import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

from grpc import aio

from rollfarm import service
from rollfarm.config import Listen, Telemetry
from rollfarm.telemetry import configure_logging
from rollfarm.v1 import engine_pb2, engine_pb2_grpc
from rollfarm.v1 import trainer_pb2 as pb
from rollfarm.v1 import trainer_pb2_grpc as grpc_stubs
from tests.kit.support import LOOPBACK, serving


class Replica(grpc_stubs.TrainerServiceServicer, engine_pb2_grpc.EngineServiceServicer):
    """Gives its name, and answers each message of a stream."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.connections: set[str] = set()

    async def GetProgress(self, request: pb.GetProgressRequest, context: Any) -> pb.GetProgressResponse:
        self.connections.add(context.peer())
        return pb.GetProgressResponse(run_id=self._name)

    async def Generate(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            yield engine_pb2.EngineServiceGenerateResponse()

    def register(self, server: aio.Server) -> None:
        grpc_stubs.add_TrainerServiceServicer_to_server(self, server)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server)

    def serving(self, listen: Listen = LOOPBACK) -> AbstractAsyncContextManager[str]:
        return serving(self.register, listen)


def say(port: int) -> None:
    print(port, flush=True)


if __name__ == "__main__":
    configure_logging("replica", Telemetry(log_level="warning"))
    replica = Replica(sys.argv[1])
    service.run(lambda: service.serve(replica.register, LOOPBACK, services=[], started=say))
