"""The server's end of StepMany: the steps of many episodes on one stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

from grpc import aio

from rollfarm import rpc
from rollfarm.error_wire import to_failure
from rollfarm.errors import EnvironmentFailed, FarmError, UnknownSession
from rollfarm.v1.environment_pb2 import StepManyRequest, StepManyResponse, StepRequest, StepResponse, StepResult
from rollfarm.v1.trajectory_pb2 import Failure

ENVELOPE_BYTES = 1024
"""What a message adds to an answer that it carries alone, at most."""


MESSAGE_STEPS = 32
"""Most steps in a message, either way: where many episodes move together, both ends then work at once."""


class StepStream:
    """Has each step begun when it comes, and sends the answers that are ready together in one message.

    A stream that breaks cancels no step: an episode outlives it, and has the answer when it is asked for again.
    """

    def __init__(self, begin: Callable[[StepRequest], asyncio.Task[StepResponse]]) -> None:
        """`begin` may raise FarmErrors, and so may the step. A step that is cancelled is of an episode that ended."""
        self._begin = begin
        self._open_count = 0
        self._ready: list[StepResult] = []
        self._woken = asyncio.Event()
        self._bug: BaseException | None = None
        self._reading: asyncio.Task[None] | None = None

    async def serve(self, asked: AsyncIterator[StepManyRequest]) -> AsyncIterator[StepManyResponse]:
        """The answers, until nothing more is asked and the last is given."""
        reading = self._reading = asyncio.create_task(self._read(asked))
        reading.add_done_callback(lambda _: self._woken.set())
        try:
            while self._ready or self._open_count or not reading.done():
                await self._woken.wait()
                self._woken.clear()
                if self._bug is not None:
                    raise self._bug
                ready, self._ready = self._ready, []
                for results in rpc.portions(ready, most=MESSAGE_STEPS):
                    yield StepManyResponse(results=results)
            if not reading.cancelled():
                await reading
        finally:
            reading.cancel()

    def end(self) -> None:
        """Take no more steps."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, asked: AsyncIterator[StepManyRequest]) -> None:
        with contextlib.suppress(aio.UsageError):  # it is how a stream that broke ends
            async for message in asked:
                for request in message.steps:
                    self._take(request)

    def _take(self, request: StepRequest) -> None:
        try:
            step = self._begin(request)
        except FarmError as error:
            self._say(request, failure=to_failure(error))
        else:
            self._open_count += 1
            step.add_done_callback(partial(self._answered, request))

    def _answered(self, request: StepRequest, step: asyncio.Task[StepResponse]) -> None:
        self._open_count -= 1
        try:
            answer = step.result()
            if answer.ByteSize() > rpc.MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
                raise EnvironmentFailed(f"The answer has {answer.ByteSize():,} bytes, more than a message may have.")
            self._say(request, answer=answer)
        except FarmError as error:
            self._say(request, failure=to_failure(error))
        except asyncio.CancelledError:
            self._say(request, failure=to_failure(UnknownSession("The episode was closed.")))
        except Exception as bug:  # `serve` raises it
            self._bug = bug
            self._woken.set()

    def _say(self, request: StepRequest, *, answer: StepResponse | None = None, failure: Failure | None = None) -> None:
        self._ready.append(StepResult(session_id=request.session_id, step=request.step, answer=answer, failure=failure))
        self._woken.set()
