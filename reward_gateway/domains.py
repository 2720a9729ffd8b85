"""One domain at work: its places, its rewards, and the groups that it compares."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from reward_gateway.asking import Asker
from reward_gateway.gathering import Comparison, Gathering
from reward_gateway.places import Places
from reward_gateway.scoring import combine
from rollfarm import rpc
from rollfarm.errors import RewardFailed
from rollfarm.reward import Score
from rollfarm.v1 import reward_gateway_pb2

MARGIN_SECONDS = 0.5
"""A wait for siblings ends so long before the caller's deadline, so that its cause still arrives."""

Episode = reward_gateway_pb2.ScoredEpisode


class Bulkhead:
    """Keeps what one domain does apart from the others: it waits for its own places alone."""

    def __init__(self, domain: str, *, concurrency: int, waiting: int, wait_seconds: float) -> None:
        self.places = Places[asyncio.Future[None]](places=concurrency, most_waiting=waiting)
        self._domain = domain
        self._wait_seconds = wait_seconds

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the domain's places. Raises RewardFailed when too many wait, or after `wait_seconds`."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        if self.places.enter(turn):
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await asyncio.shield(turn)
        except BaseException as error:
            if not self.places.give_up(turn):
                self._leave()
            if isinstance(error, TimeoutError):
                waited = f"Domain {self._domain} had no place in {self._wait_seconds:g} s."
                raise RewardFailed(waited, domain=self._domain) from None
            raise

    def _leave(self) -> None:
        following = self.places.leave()
        if following is not None:
            following.set_result(None)


class Domain:
    """Scores the episodes of one domain."""

    def __init__(
        self, name: str, askers: Sequence[Asker], bulkhead: Bulkhead, comparer: "Comparer | None" = None
    ) -> None:
        self.name = name
        self.askers = askers
        self.bulkhead = bulkhead
        self._comparer = comparer
        self._single = [asker for asker in askers if not asker.share.compares]

    async def score(self, request: reward_gateway_pb2.ScoreRequest) -> reward_gateway_pb2.ScoreResponse:
        """The sum of its rewards. Raises RewardFailed."""
        if self._comparer is not None:
            check_group(request)
        scores: dict[Asker, Score] = {}
        if self._single:
            async with self.bulkhead.place():
                scores |= await _settled(self._single, request.episode)
        if self._comparer is not None:
            scores |= await self._comparer.compare(request)
        return combine([asker.share for asker in self.askers], [scores[asker] for asker in self.askers])

    async def close(self) -> None:
        """Cancel what goes on without a caller."""
        if self._comparer is not None:
            await self._comparer.close()


async def _settled(askers: Sequence[Asker], episode: Episode) -> Mapping[Asker, Score]:
    """Every reward is asked and settled, so that none is left running for an episode that failed already."""
    if len(askers) == 1:
        return {askers[0]: await askers[0].ask(episode)}
    answers = await asyncio.gather(*(asker.ask(episode) for asker in askers), return_exceptions=True)
    return {asker: _value(answer) for asker, answer in zip(askers, answers, strict=True)}


def _value(answer: Score | BaseException) -> Score:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def check_group(request: reward_gateway_pb2.ScoreRequest) -> None:
    """Raise RewardFailed for an episode that has no siblings to be compared with."""
    if not request.group_id or request.group_size < 2:
        raise RewardFailed(
            "The domain has a reward that compares the members of a group, and this episode has no siblings "
            f"(group_id {request.group_id!r}, group_size {request.group_size}), as in validation.",
            group_size=request.group_size,
        )


Verdicts = Mapping[Asker, Score]
"""Of one member, by the reward that compared."""


class Comparer:
    """Gathers groups, and compares each when it is complete, whichever of the callers are still there."""

    def __init__(
        self,
        askers: Sequence[Asker],
        bulkhead: Bulkhead,
        gathering: Gathering[str, Episode],
        *,
        gather_seconds: float,
    ) -> None:
        self._askers = askers
        self._bulkhead = bulkhead
        self._gathering = gathering
        self._tasks: set[asyncio.Task[None]] = set()
        self._gather_seconds = gather_seconds
        self._calls: dict[str, dict[int, list[asyncio.Future[Verdicts]]]] = {}

    async def compare(self, request: reward_gateway_pb2.ScoreRequest) -> Verdicts:
        """The member's verdicts, once its siblings are here. Raises RewardFailed, also when they do not come."""
        group, now = request.group_id, time.monotonic()
        comparison = self._gathering.add(
            group, request.member, request.group_size, request.episode, request.episode.ByteSize(), now
        )
        call: asyncio.Future[Verdicts] = asyncio.get_running_loop().create_future()
        self._calls.setdefault(group, {}).setdefault(request.member, []).append(call)
        if comparison is not None:
            judging = self._judge(self._taken(group, comparison), comparison)
            task = asyncio.get_running_loop().create_task(judging, context=rpc.detached())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._forget(now)
        return await self._answer(call, request)

    async def close(self) -> None:
        """Cancel the comparisons that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _taken(self, group: str, comparison: Comparison[Episode]) -> dict[int, list[asyncio.Future[Verdicts]]]:
        """The calls that the comparison answers."""
        calls = self._calls.get(group, {})
        taken = {member: calls.pop(member, []) for member in comparison.judged}
        if not calls:
            self._calls.pop(group, None)
        return taken

    async def _judge(
        self, calls: Mapping[int, list[asyncio.Future[Verdicts]]], comparison: Comparison[Episode]
    ) -> None:
        try:
            verdicts = await self._verdicts(comparison)
        except BaseException as error:  # a bug rises in the calls
            _fail(calls, error)
            return
        for member, waiting in calls.items():
            for call in waiting:
                if not call.done():
                    call.set_result(verdicts[member])

    async def _verdicts(self, comparison: Comparison[Episode]) -> Mapping[int, Verdicts]:
        episodes = list(comparison.episodes.values())
        async with self._bulkhead.place():
            columns = [await asker.compare(episodes) for asker in self._askers]
        return {
            member: {asker: column[row] for asker, column in zip(self._askers, columns, strict=True)}
            for row, member in enumerate(comparison.episodes)
        }

    async def _answer(self, call: "asyncio.Future[Verdicts]", request: reward_gateway_pb2.ScoreRequest) -> Verdicts:
        seconds = max(0.0, min(self._gather_seconds, rpc.remaining(self._gather_seconds) - MARGIN_SECONDS))
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            here = self._gathering.here(request.group_id)
            raise RewardFailed(
                f"The group was not compared in {seconds:.0f} s; {here} of its {request.group_size} members are here.",
                group_id=request.group_id,
                here=here,
            ) from None
        finally:
            self._drop(call, request)

    def _drop(self, call: "asyncio.Future[Verdicts]", request: reward_gateway_pb2.ScoreRequest) -> None:
        calls = self._calls.get(request.group_id, {}).get(request.member, [])
        if call in calls:
            calls.remove(call)

    def _forget(self, now: float) -> None:
        for group in self._gathering.forget(now):
            forgotten = RewardFailed(
                "The group rested for gather_seconds, or others needed its room (gather_megabytes), before it was "
                "complete.",
                group_id=group,
            )
            _fail(self._calls.pop(group, {}), forgotten)


def _fail(calls: Mapping[int, list["asyncio.Future[Verdicts]"]], error: BaseException) -> None:
    for waiting in calls.values():
        for call in waiting:
            if not call.done():
                call.set_exception(error)
