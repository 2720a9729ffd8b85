"""The kit's server and client over real sockets."""

import asyncio
import gc
import logging
import socket
import weakref
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest
import structlog

from rollfarm import rpc, telemetry
from rollfarm.config import Listen, Telemetry
from rollfarm.errors import DeadlineExceeded, JournalUnavailable, Unavailable, UnknownRun
from rollfarm.ports import free_port
from rollfarm.service import Bell, Changed, PortInUse, calm_collector, run, serve
from rollfarm.v1 import engine_pb2, engine_pb2_grpc
from rollfarm.v1 import trainer_pb2 as pb
from rollfarm.v1 import trainer_pb2_grpc as grpc_stubs
from tests.kit import support
from tests.kit.support import LOOPBACK

ROUNDING = 0.1
"""Seconds by which a deadline may grow on its way: it travels in coarse units."""

log = structlog.get_logger()


class Trainer(grpc_stubs.TrainerServiceServicer):
    def __init__(self) -> None:
        self.calls = 0
        self.remaining: float | None = None
        self.trace = ""

    async def GetProgress(self, request, context):
        self.calls += 1
        self.trace = telemetry.trace_id.get()
        log.info("asked", calls=self.calls)
        if self.calls < 3:
            raise JournalUnavailable("Redis is away.")
        return pb.GetProgressResponse(run_id="run")

    async def Checkpoint(self, request, context):
        raise UnknownRun("No run 'x'.", run="x")

    async def WaitForVersion(self, request, context):
        self.remaining = rpc.remaining(1000)
        await asyncio.Event().wait()
        return pb.WaitForVersionResponse()


class Engine(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self) -> None:
        self.remaining: list[float] = []

    async def Generate(self, request_iterator, context):
        async for _ in request_iterator:
            self.remaining.append(rpc.remaining(1000))
            yield engine_pb2.EngineServiceGenerateResponse()


def serving(trainer: Trainer, listen: Listen = LOOPBACK) -> AbstractAsyncContextManager[str]:
    return support.serving(lambda server: grpc_stubs.add_TrainerServiceServicer_to_server(trainer, server), listen)


@pytest.fixture
def logging_restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.basicConfig(handlers=[], force=True)


async def test_a_server_error_arrives_as_the_same_class_with_its_facts():
    async with serving(Trainer()) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        with pytest.raises(UnknownRun, match="No run 'x'") as refused:
            await rpc.call(stub.Checkpoint, pb.CheckpointRequest(), timeout=5)

    assert refused.value.facts == {"run": "x"}


async def test_unavailable_is_retried_and_the_trace_travels():
    trainer = Trainer()
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)
        telemetry.trace_id.set("a" * 32)

        answer = await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10)

    assert (answer.run_id, trainer.calls, trainer.trace) == ("run", 3, "a" * 32)


@pytest.mark.parametrize("log_format", ["console", "json"])
async def test_a_log_line_names_the_trace_of_the_call_behind_it(log_format, logging_restored, capsys):
    telemetry.configure_logging("trainer", Telemetry(log_format=log_format))
    trainer = Trainer()
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)
        telemetry.begin_trace()

        await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10)

    lines = [line.partition("trace_id")[2] for line in capsys.readouterr().err.splitlines() if "asked" in line]
    assert len(lines) == 3
    assert all(telemetry.trace_id.get() in line for line in lines)


async def test_calls_outside_of_a_trace_have_each_their_own():
    trainer, traces = Trainer(), set()
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        for _ in range(2):
            await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10)
            traces.add(trainer.trace)

    assert len(traces - {""}) == 2


async def test_without_retry_the_first_unavailable_is_raised():
    trainer = Trainer()
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)

        with pytest.raises(JournalUnavailable):
            await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10, retry=False)

    assert trainer.calls == 1


async def test_a_new_channel_does_not_wait_out_the_backoff_of_an_older_one():
    port = free_port()
    address = f"{LOOPBACK.host}:{port}"
    async with rpc.channel(address) as refused:
        stub = grpc_stubs.TrainerServiceStub(refused)
        with pytest.raises(Unavailable):
            await rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=10, retry=False)
        trainer = Trainer()

        async with serving(trainer, Listen(port=port)), rpc.channel(address) as channel:
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
    assert trainer.remaining <= 0.3 + ROUNDING


async def test_a_stream_continues_the_deadline_of_its_caller_and_has_none_of_its_own():
    engine = Engine()
    async with (
        support.serving(lambda server: engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)) as address,
        rpc.channel(address) as channel,
    ):
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        for call in (stub.Generate(timeout=5), stub.Generate()):
            await call.write(engine_pb2.EngineServiceGenerateRequest())
            await call.read()
            call.cancel()

    bounded, unbounded = engine.remaining
    assert 0 < bounded <= 5 + ROUNDING
    assert unbounded == 1000


async def test_what_is_detached_from_a_call_outlives_its_deadline():
    async def left() -> float:
        return rpc.remaining(1000)

    rpc.adopt_deadline(5)
    telemetry.begin_trace()

    assert await asyncio.create_task(left()) <= 5
    assert await asyncio.create_task(left(), context=rpc.detached()) == 1000
    assert rpc.detached()[telemetry.trace_id] == telemetry.trace_id.get()


async def test_a_burst_of_calls_is_answered_in_its_turn():
    trainer = Trainer()
    trainer.calls = 3
    async with serving(trainer) as address, rpc.channel(address) as channel:
        stub = grpc_stubs.TrainerServiceStub(channel)
        calls = [rpc.call(stub.GetProgress, pb.GetProgressRequest(), timeout=60, retry=False) for _ in range(3000)]

        answers = await asyncio.gather(*calls)

    assert {answer.run_id for answer in answers} == {"run"}


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
        with pytest.raises(PortInUse, match=f"Cannot listen on {address}"):
            async with serving(Trainer(), Listen(port=port)):
                pass


def test_a_quick_service_runs_on_uvloop_where_that_is_installed():
    uvloop = pytest.importorskip("uvloop")
    loops: list[asyncio.AbstractEventLoop] = []

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    for quick in (True, False):
        with pytest.raises(SystemExit):
            run(note, quick=quick)

    assert [isinstance(loop, uvloop.Loop) for loop in loops] == [True, False]


def serve_grpc(port: int) -> None:
    run(lambda: serve(lambda server: None, Listen(port=port), services=[]), port_flag="--trainer.listen.port")


def serve_metrics(port: int) -> None:
    telemetry.start_telemetry("trainer", Telemetry(metrics_port=port), LOOPBACK)


@pytest.mark.parametrize(
    ("start", "flag"), [(serve_grpc, "--trainer.listen.port"), (serve_metrics, "--trainer.telemetry.metrics_port")]
)
def test_a_service_whose_port_is_taken_exits_and_names_the_flag_for_another(start, flag, logging_restored, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            start(port)

    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert said.endswith(f"Stop what uses the port, or choose another with {flag}.\n")


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


async def test_who_has_waited_longest_is_served_first():
    changed, work, served = Changed(), list[int](), list[int]()

    async def poll(number: int) -> None:
        if await changed.first(lambda: work.pop() if work else None, 5) is not None:
            served.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(poll(number))
            await asyncio.sleep(0)
        for _ in range(20):
            work.append(1)
            changed.notify()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    assert served == list(range(20))


async def test_a_bell_wakes_who_waits_and_forgets_who_does_not():
    bell = Bell()
    bell.ring()
    waiting = asyncio.create_task(bell.rung())
    await asyncio.sleep(0)
    assert not waiting.done()

    bell.ring()
    bell.ring()
    await waiting

    given_up = asyncio.create_task(bell.rung())
    await asyncio.sleep(0)
    given_up.cancel()
    bell.ring()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    bell.ring()


def test_a_calm_collector_leaves_what_is_there_alone_and_still_finds_young_cycles():
    class Node:
        pass

    before = gc.get_threshold()
    try:
        calm_collector()

        node = Node()
        node.itself = node  # pyright: ignore[reportAttributeAccessIssue]
        gone = weakref.ref(node)
        del node
        young = [[] for _ in range(2 * gc.get_threshold()[0])]

        assert gone() is None, len(young)
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[2] > before[2]
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_where_old_cycles_may_come_up_the_collector_looks_at_all_more_often():
    class Node:
        pass

    before = gc.get_threshold()
    try:
        calm_collector(looks=1)
        node = Node()
        node.itself = node  # pyright: ignore[reportAttributeAccessIssue]
        gone = weakref.ref(node)
        gc.collect(1)  # it is old now
        del node
        kept = [[] for _ in range(5 * 20 * gc.get_threshold()[0])]

        assert gone() is None, len(kept)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
