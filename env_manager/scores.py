"""Asks reward_gateway for scores, many to a call: episodes that end together travel together.

Each is answered as soon as it is scored, however long the others take. One that nobody waits for any more is scored all
the same.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        """The score. Raises the FarmError that reward_gateway answered, or why it did not."""
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
                asked, self._waiting = self._waiting, []
                pace.sent(len(asked))
                for portion in rpc.portions([each.request for each in asked]):
                    calls.create_task(self._insist(asked[: len(portion)]))
                    asked = asked[len(portion) :]

    async def _insist(self, asked: Sequence[_Waiting]) -> None:
        """Have all of it answered, again and again while reward_gateway is away."""
        loop = asyncio.get_running_loop()
        end, backoff = loop.time() + self._seconds, rpc.FIRST_RETRY_SECONDS
        while True:
            error = await self._call(asked, end - loop.time())
            asked = [each for each in asked if not each.answer.done()]
            if not asked:
                return
            if not is_retryable(error) or loop.time() + backoff >= end:
                break
            await asyncio.sleep(backoff * random.uniform(0.5, 1))
            backoff = min(2 * backoff, rpc.LAST_RETRY_SECONDS)
        for each in asked:
            each.answer.set_exception(error)

    async def _call(self, asked: Sequence[_Waiting], seconds: float) -> FarmError:
        """Settle what one call answers; why it settled no more."""
        request = reward_gateway_pb2.ScoreManyRequest(requests=[each.request for each in asked])
        try:
            async for answer in rpc.stream(self._stub.ScoreMany, request, timeout=seconds):
                for result in answer.results:
                    _settle(asked[result.index].answer, result)
        except FarmError as error:
            return error
        return Unavailable("reward_gateway ended the call.")


def _settle(answer: asyncio.Future[reward_gateway_pb2.ScoreResponse], result: reward_gateway_pb2.ScoreResult) -> None:
    if answer.done():
        return
    if result.HasField("failure"):
        answer.set_exception(from_failure(result.failure))
    else:
        answer.set_result(result.scored)
