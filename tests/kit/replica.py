"""`python -m tests.kit.replica NAME`: a replica as a process of its own; prints its port."""

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from grpc import aio

from rollfarm import service
from rollfarm.config import Listen, Telemetry
from rollfarm.telemetry import configure_logging
from rollfarm.v1 import engine_pb2, engine_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.kit.support import LOOPBACK, serving


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Gives its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.connections: set[str] = set()

    async def GetProgress(self, request: trainer_pb2.GetProgressRequest, context: Any) -> Any:
        self.connections.add(context.peer())
        return trainer_pb2.GetProgressResponse(run_id=self._name)


class Engine(engine_pb2_grpc.EngineServiceServicer):
    """Answers each message of a stream."""

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield engine_pb2.EngineServiceGenerateResponse()


class Replica:
    """One of several servers that are alike."""

    def __init__(self, name: str) -> None:
        self._trainer = Trainer(name)

    @property
    def connections(self) -> set[str]:
        """Those that calls came by."""
        return self._trainer.connections

    def register(self, server: aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self._trainer, server)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(Engine(), server)

    def serving(self, listen: Listen = LOOPBACK) -> AbstractAsyncContextManager[str]:
        return serving(self.register, listen)


def say(port: int) -> None:
    print(port, flush=True)


if __name__ == "__main__":
    configure_logging("replica", Telemetry(log_level="warning"))
    replica = Replica(sys.argv[1])
    service.run(lambda: service.serve(replica.register, LOOPBACK, services=[], started=say))
