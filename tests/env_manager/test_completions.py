"""Finished episodes on their way to sample_buffer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from env_manager.completions import Completions
from rollfarm import rpc
from rollfarm.error_wire import to_failure
from rollfarm.errors import LeaseExpired
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc, trajectory_pb2
from tests.env_manager.fakes import serving


@dataclass(eq=False)
class SlowBuffer(sample_buffer_pb2_grpc.SampleBufferServiceServicer):
    """Answers no call before it is told to, and knows no lease named "late"."""

    calls: list[list[str]] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def register(self, server: aio.Server) -> None:
        sample_buffer_pb2_grpc.add_SampleBufferServiceServicer_to_server(self, server)

    async def CompleteEpisodes(self, request: pb.CompleteEpisodesRequest, context: Any) -> Any:
        self.calls.append([completion.lease_id for completion in request.completions])
        self.called.set()
        await self.go.wait()
        late = pb.CompletionResult(failure=to_failure(LeaseExpired("Lease late is not out.")))
        taken = pb.CompletionResult(completed=pb.CompleteEpisodeResponse(disposition=pb.DISPOSITION_ACCEPTED))
        return pb.CompleteEpisodesResponse(results=[late if name == "late" else taken for name in self.calls[-1]])


@asynccontextmanager
async def sending(buffer: SlowBuffer) -> AsyncIterator[Completions]:
    async with serving(buffer.register) as address, rpc.channel(address) as channel:
        completions = Completions(sample_buffer_pb2_grpc.SampleBufferServiceStub(channel))
        running = asyncio.create_task(completions.run())
        yield completions
        running.cancel()


def hand_in(completions: Completions, lease_id: str, *, size: int = 1, seconds: float = 20.0) -> "asyncio.Task[None]":
    trajectory = trajectory_pb2.Trajectory(turns=[trajectory_pb2.Turn(token_ids=bytes(size))])
    request = pb.CompleteEpisodeRequest(lease_id=lease_id, trajectory=trajectory)
    return asyncio.create_task(completions.hand_in(request, seconds=seconds))


async def test_what_finishes_during_one_call_goes_together_in_the_next():
    buffer = SlowBuffer()
    async with sending(buffer) as completions:
        first = hand_in(completions, "a")
        await buffer.called.wait()
        others = [hand_in(completions, name) for name in ("b", "late", "c")]
        await asyncio.sleep(0)
        buffer.go.set()
        answers = await asyncio.gather(first, *others, return_exceptions=True)

    assert buffer.calls == [["a"], ["b", "late", "c"]]
    assert [type(answer) for answer in answers] == [type(None), type(None), LeaseExpired, type(None)]


async def test_a_call_is_of_moderate_size():
    buffer = SlowBuffer()
    buffer.go.set()
    async with sending(buffer) as completions:
        sizes = (3_000_000, 1_000_000, 1_000_000, 5_000_000)
        await asyncio.gather(*(hand_in(completions, f"{at}", size=size) for at, size in enumerate(sizes)))

    assert buffer.calls == [["0", "1"], ["2"], ["3"]]


async def test_one_that_nobody_waits_for_any_more_spoils_no_other():
    buffer = SlowBuffer()
    async with sending(buffer) as completions:
        first, second = hand_in(completions, "a"), hand_in(completions, "b")
        await buffer.called.wait()
        first.cancel()
        buffer.go.set()
        await second

    assert first.cancelled()


async def test_without_an_answer_each_is_told_so():
    buffer = SlowBuffer()
    async with sending(buffer) as completions:
        waiting = [hand_in(completions, name, seconds=0.3) for name in ("a", "b")]
        answers = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(answer).__name__ for answer in answers] == ["DeadlineExceeded"] * 2
