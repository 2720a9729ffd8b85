"""The kit's server and client over real sockets."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollfarm import rpc, telemetry
from rollfarm.config import Listen
from rollfarm.errors import DeadlineExceeded, JournalUnavailable, Unavailable, UnknownRun
from rollfarm.service import Changed, PortInUse, serve
from rollfarm.v1 import trainer_pb2 as pb
from rollfarm.v1 import trainer_pb2_grpc as grpc_stubs

NAME = "rollfarm.v1.TrainerService"
LOOPBACK = Listen()


class Trainer(grpc_stubs.TrainerServiceServicer):
    def __init__(self) -> None:
        self.calls = 0
        self.remaining: float | None = None
        self.trace = ""

    async def GetProgress(self, request, context):
        self.calls += 1
        self.trace = telemetry.trace_id.get()
        if self.calls < 3:
            raise JournalUnavailable("Redis is away.")
        return pb.GetProgressResponse(run_id="run")

    async def Checkpoint(self, request, context):
        raise UnknownRun("No run 'x'.", run="x")

    async def WaitForVersion(self, request, context):
        self.remaining = rpc.remaining(1000)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(servicer: Trainer, listen: Listen = LOOPBACK):
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def register(server):
        grpc_stubs.add_TrainerServiceServicer_to_server(servicer, server)

    server = asyncio.create_task(serve(register, listen, services=[NAME], stop=stop, started=port.set_result))
    await asyncio.wait([server, port], return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        await server
    try:
        yield f"127.0.0.1:{port.result()}"
    finally:
        stop.set()
        await server


async def test_a_server_error_arrives_as_the_same_class_with_its_facts():
    async with serving(Trainer()) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        with pytest.raises(UnknownRun, match="No run 'x'") as refused:
            await rpc.call(stub.Checkpoint, pb.CheckpointRequest(), timeout=5)

    assert refused.value.facts == {"run": "x"}


async def test_unavailable_is_retried_and_the_trace_travels():
    trainer = Trainer()
    telemetry.trace_id.set("a" * 32)
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        answer = await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10)

    assert (answer.run_id, trainer.calls, trainer.trace) == ("run", 3, "a" * 32)


async def test_without_retry_the_first_unavailable_is_raised():
    trainer = Trainer()
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        with pytest.raises(JournalUnavailable):
            await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10, retry=False)

    assert trainer.calls == 1


async def test_a_deadline_is_enforced_and_passed_on():
    trainer = Trainer()
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        with pytest.raises(DeadlineExceeded):
            await rpc.call(stub.WaitForVersion, pb.WaitForVersionRequest(), timeout=0.3)

    assert trainer.remaining is not None
    assert trainer.remaining <= 0.3


async def test_a_service_that_is_away_is_unavailable():
    async with rpc.channel("127.0.0.1:1") as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        with pytest.raises(Unavailable, match="Check that the service runs"):
            await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=5, retry=False)


async def test_health_says_serving_and_a_drained_server_is_gone():
    async with serving(Trainer()) as address:
        assert await rpc.is_serving(address, timeout=5)

    assert not await rpc.is_serving(address, timeout=1)


async def test_a_taken_port_is_refused_with_a_remedy():
    async with serving(Trainer()) as address:
        port = int(address.split(":")[1])
        with pytest.raises(PortInUse, match="choose another"):
            async with serving(Trainer(), Listen(port=port)):
                pass


async def test_a_loop_that_raises_takes_the_service_down():
    async def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as crashed:
        await serve(lambda server: None, Listen(), broken, services=[], stop=asyncio.Event())

    assert crashed.group_contains(ZeroDivisionError)


async def test_a_long_poll_wakes_at_a_change_and_otherwise_answers_none():
    changed, values = Changed(), []
    waiting = asyncio.create_task(changed.first(lambda: values[0] if values else None, 5))
    await asyncio.sleep(0)

    values.append("ready")
    changed.notify()

    assert await waiting == "ready"
    assert await changed.first(lambda: None, 0.01) is None
