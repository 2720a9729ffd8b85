"""Hands finished episodes in, many to a call: whatever finished while one call was under way goes into the next."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from rollfarm import rpc
from rollfarm.error_wire import from_failure
from rollfarm.errors import FarmError
from rollfarm.v1 import sample_buffer_pb2


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    request: sample_buffer_pb2.CompleteEpisodeRequest
    end: float
    """When the loop's clock says that nobody waits any more."""
    answer: asyncio.Future[None]


class Completions:
    """The way of finished episodes to sample_buffer."""

    def __init__(self, stub: Any) -> None:
        """`stub` is a SampleBufferServiceStub on an aio channel."""
        self._stub = stub
        self._waiting: deque[_Waiting] = deque()
        self._wanted = asyncio.Event()

    async def hand_in(self, request: sample_buffer_pb2.CompleteEpisodeRequest, *, seconds: float) -> None:
        """Return once sample_buffer has it. Raises why it was refused, or why nobody answered in `seconds`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.time() + seconds, loop.create_future())
        self._waiting.append(waiting)
        self._wanted.set()
        await waiting.answer

    async def run(self) -> None:
        """Send what waits, forever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._waiting:
                await self._send(self._portion())

    def _portion(self) -> list[_Waiting]:
        """The oldest ones, as many as fit into one message of moderate size."""
        portion = [self._waiting.popleft()]
        room = rpc.CHUNK_BYTES - portion[0].request.ByteSize()
        while self._waiting and (room := room - self._waiting[0].request.ByteSize()) >= 0:
            portion.append(self._waiting.popleft())
        return portion

    async def _send(self, portion: list[_Waiting]) -> None:
        request = sample_buffer_pb2.CompleteEpisodesRequest(completions=[waiting.request for waiting in portion])
        seconds = max(waiting.end for waiting in portion) - asyncio.get_running_loop().time()
        try:
            answer = await rpc.call(self._stub.CompleteEpisodes, request, timeout=seconds)
        except FarmError as error:
            results: list[FarmError | None] = [error] * len(portion)
        else:
            results = [from_failure(r.failure) if r.HasField("failure") else None for r in answer.results]
        for waiting, error in zip(portion, results, strict=True):
            _settle(waiting.answer, error)


def _settle(answer: asyncio.Future[None], error: FarmError | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
