"""Asks reward_gateway for scores, many to a call: episodes that end together travel together.

Each is answered as soon as it is scored, however long the others take. One that nobody waits for any more is cancelled,
by itself.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.rpc import code_pb2

from rollfarm import rpc
from rollfarm.error_wire import from_failure
from rollfarm.errors import FarmError, Unavailable, is_retryable
from rollfarm.v1 import reward_gateway_pb2


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    request: reward_gateway_pb2.ScoreRequest
    answer: asyncio.Future[reward_gateway_pb2.ScoreResponse]


class Scores:
    """The way to reward_gateway, while `run` runs."""

    def __init__(self, stub: Any, *, seconds: float) -> None:
        """`stub` is a RewardGatewayServiceStub on an aio channel; each score may take `seconds`."""
        self._stub = stub
        self._seconds = seconds
        self._waiting: list[_Waiting] = []
        self._wanted = asyncio.Event()

    async def ask(self, request: reward_gateway_pb2.ScoreRequest) -> reward_gateway_pb2.ScoreResponse:
        """The score. Cancelling the caller cancels it. Raises the FarmError that reward_gateway answered, or why it did
        not."""
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wanted.set()
        return await waiting.answer

    async def run(self) -> None:
        """Ask for what waits, until cancelled."""
        pace = rpc.Pace()
        async with asyncio.TaskGroup() as calls:
            while True:
                await self._wanted.wait()
                await pace.wait()
                self._wanted.clear()
                asked, self._waiting = _unsettled(self._waiting), []
                pace.sent(len(asked))
                for portion in rpc.portions([each.request for each in asked]):
                    calls.create_task(self._insist(asked[: len(portion)]))
                    asked = asked[len(portion) :]

    async def _insist(self, asked: Sequence[_Waiting]) -> None:
        """Have all of it answered, again and again while reward_gateway is away or older."""
        loop = asyncio.get_running_loop()
        end, backoff = loop.time() + self._seconds, rpc.FIRST_RETRY_SECONDS
        while True:
            error = await self._call(asked, end - loop.time())
            asked = _unsettled(asked)
            if not asked:
                return
            if not _may_pass(error) or loop.time() + backoff >= end:
                break
            await asyncio.sleep(backoff * random.uniform(0.5, 1))
            backoff = min(2 * backoff, rpc.LAST_RETRY_SECONDS)
        for each in asked:
            each.answer.set_exception(error)

    async def _call(self, asked: Sequence[_Waiting], seconds: float) -> FarmError:
        """Settle what one call answers; why it settled no more."""
        unwanted: asyncio.Queue[int | None] = asyncio.Queue()
        for index, each in enumerate(asked):
            each.answer.add_done_callback(partial(_give_up, unwanted, index))
        try:
            async for answer in rpc.stream(self._stub.ScoreMany, _requests(asked, unwanted), timeout=seconds):
                for result in answer.results:
                    _settle(asked[result.index].answer, result)
        except FarmError as error:
            return error
        finally:
            unwanted.put_nowait(None)
        return Unavailable("reward_gateway ended the call.")


def _may_pass(error: FarmError) -> bool:
    """Whether another attempt may succeed. While reward_gateway is upgraded, an older one may not know the call yet."""
    return is_retryable(error) or error.code == code_pb2.UNIMPLEMENTED


def _unsettled(asked: Sequence[_Waiting]) -> list[_Waiting]:
    return [each for each in asked if not each.answer.done()]


def _give_up(unwanted: asyncio.Queue[int | None], index: int, answer: asyncio.Future[Any]) -> None:
    if answer.cancelled():
        unwanted.put_nowait(index)


async def _requests(
    asked: Sequence[_Waiting], unwanted: asyncio.Queue[int | None]
) -> AsyncIterator[reward_gateway_pb2.ScoreManyRequest]:
    """What one call sends: everything, then what becomes unwanted, until None does."""
    yield reward_gateway_pb2.ScoreManyRequest(requests=[each.request for each in asked])
    while (index := await unwanted.get()) is not None:
        yield reward_gateway_pb2.ScoreManyRequest(cancelled_indexes=[index])


def _settle(answer: asyncio.Future[reward_gateway_pb2.ScoreResponse], result: reward_gateway_pb2.ScoreResult) -> None:
    if answer.done():
        return
    if result.HasField("failure"):
        answer.set_exception(from_failure(result.failure))
    else:
        answer.set_result(result.scored)
