"""EnvManagerService: workers dial in, and people ask how it fares."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from env_manager.attached import check_token, serve
from env_manager.hosts import Hosts
from rollfarm.sandbox import shared
from rollfarm.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

SERVICE = "rollfarm.v1.EnvManagerService"

Status = environment_pb2.EnvManagerServiceGetStatusResponse


class EnvManagerServicer(environment_pb2_grpc.EnvManagerServiceServicer):
    """Lets workers in that have the token, and tells how env_manager fares."""

    def __init__(self, hosts: Hosts, status: Callable[[], Status], *, attach_token: str = "") -> None:
        """Without a token, only workers on this machine are let in."""
        self._hosts = hosts
        self._status = status
        self._token = attach_token

    def register(self, server: aio.Server) -> None:
        environment_pb2_grpc.add_EnvManagerServiceServicer_to_server(self, server)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[environment_pb2.AttachResponse]:
        check_token(self._token, context.invocation_metadata() or (), context.peer())
        async for call in serve(context.peer(), aiter(request_iterator), self._hosts):
            yield call

    async def GetStatus(self, request: environment_pb2.EnvManagerServiceGetStatusRequest, context: Any) -> Status:
        return self._status()


def sandbox_level() -> "trajectory_pb2.SandboxLevel.ValueType":
    """What keeps in the code that this process has run for a model; unspecified before it ran any."""
    if not shared.cache_info().currsize:
        return trajectory_pb2.SANDBOX_LEVEL_UNSPECIFIED
    return shared().level
