"""EnvironmentService for classes of `rollfarm.env`."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpc import aio

from rollfarm import env_wire, telemetry
from rollfarm.config import nearest
from rollfarm.env import MAX_SESSIONS, Action, Kind, name_of
from rollfarm.env_steps import StepStream
from rollfarm.errors import InvalidArgument, UnknownEnvironment, UnknownSession
from rollfarm.playing import CLOSE_SECONDS, Play, read_settings
from rollfarm.v1 import environment_pb2, environment_pb2_grpc

SERVICE = "rollfarm.v1.EnvironmentService"

T = TypeVar("T")


@dataclass
class _Session:
    play: Play
    trace_id: str
    """Of the call that reset it; steps of a stream bring none of their own."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    reset: environment_pb2.ResetResponse | None = None
    step_number: int = -1
    step: environment_pb2.StepResponse | None = None
    score: environment_pb2.EnvironmentServiceScoreResponse | None = None
    begun: dict[str, asyncio.Task[Any]] = field(default_factory=dict[str, asyncio.Task[Any]])
    """Calls that are being answered, by what they ask."""

    def begin(self, asked: str, answer: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T]":
        """Begin the answer, unless it was begun."""
        task = self.begun.get(asked)
        if task is None:
            task = self.begun[asked] = asyncio.create_task(answer())
            task.add_done_callback(lambda _: self.begun.pop(asked))
        return task

    async def once(self, asked: str, answer: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer. One that was begun goes on though its caller is gone, and whoever asks again waits for it, too.

        Raises UnknownSession when the episode is closed meanwhile.
        """
        task = self.begin(asked, answer)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise UnknownSession("The episode was closed.") from None
            raise

    async def close(self) -> None:
        """Break off what is being answered, and let go."""
        for task in (begun := list(self.begun.values())):
            task.cancel()
        if begun:
            await asyncio.wait(begun, timeout=CLOSE_SECONDS)
        await self.play.close()


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Serves environments. A retried call gets the first answer; calls of one episode run one at a time."""

    def __init__(self, kinds: Sequence[Kind] | Mapping[str, Kind], *, max_sessions: int = MAX_SESSIONS) -> None:
        """`kinds` may give names of their own."""
        self._kinds = kinds if isinstance(kinds, Mapping) else {name_of(kind): kind for kind in kinds}
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._streams: set[StepStream] = set()

    def register(self, server: aio.Server) -> None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def Describe(
        self, request: environment_pb2.DescribeRequest, context: Any
    ) -> environment_pb2.DescribeResponse:
        return self.description

    @property
    def description(self) -> environment_pb2.DescribeResponse:
        """What is played here, and how much of it at once."""
        return environment_pb2.DescribeResponse(
            environments=[describe(name, kind) for name, kind in self._kinds.items()], max_sessions=self._max_sessions
        )

    async def Reset(self, request: environment_pb2.ResetRequest, context: Any) -> environment_pb2.ResetResponse:
        kind = self._kinds.get(request.task.environment)
        if kind is None:
            raise unknown_environment(request.task.environment, self._kinds)
        session = self._sessions.get(request.session_id)
        if session is None:
            session = _Session(
                play=Play(kind, read_settings(kind, request.task.settings_json)), trace_id=telemetry.trace_id.get()
            )
            self._sessions[request.session_id] = session
            await self._make_room()
        return await session.once("reset", lambda: self._reset(session, request))

    async def _reset(self, session: _Session, request: environment_pb2.ResetRequest) -> environment_pb2.ResetResponse:
        async with session.lock:
            if session.reset is None:
                shown = await session.play.reset(request.task.seed, request.task.index)
                session.reset = env_wire.to_reset(shown)
            return session.reset

    async def Step(self, request: environment_pb2.StepRequest, context: Any) -> environment_pb2.StepResponse:
        session = self._session(request.session_id)
        return await session.once(f"step {request.step}", lambda: self._step(session, request))

    def _begin_step(self, request: environment_pb2.StepRequest) -> asyncio.Task[environment_pb2.StepResponse]:
        session = self._session(request.session_id)
        return session.begin(f"step {request.step}", lambda: self._step(session, request))

    async def _step(self, session: _Session, request: environment_pb2.StepRequest) -> environment_pb2.StepResponse:
        telemetry.trace_id.set(session.trace_id)
        async with session.lock:
            if request.step == session.step_number and session.step is not None:
                return session.step
            if request.step != session.step_number + 1:
                raise InvalidArgument(
                    f"Step {request.step} does not follow step {session.step_number}.",
                    step=request.step,
                    last_step=session.step_number,
                )
            step = await session.play.step(_read_action(request))
            session.step_number, session.step = request.step, env_wire.to_step(step)
            return session.step

    async def StepMany(
        self, request_iterator: AsyncIterator[environment_pb2.StepManyRequest], context: Any
    ) -> AsyncIterator[environment_pb2.StepManyResponse]:
        await context.send_initial_metadata(())
        stream = StepStream(self._begin_step)
        self._streams.add(stream)
        try:
            async for answers in stream.serve(aiter(request_iterator)):
                yield answers
        finally:
            self._streams.discard(stream)

    async def drain(self) -> None:
        """End the streams of steps, each with its last answer: they would keep the server from stopping."""
        for stream in self._streams:
            stream.end()

    async def Score(
        self, request: environment_pb2.EnvironmentServiceScoreRequest, context: Any
    ) -> environment_pb2.EnvironmentServiceScoreResponse:
        session = self._session(request.session_id)
        return await session.once("score", lambda: self._score(session, request))

    async def _score(
        self, session: _Session, request: environment_pb2.EnvironmentServiceScoreRequest
    ) -> environment_pb2.EnvironmentServiceScoreResponse:
        async with session.lock:
            if session.score is None:
                verdict = await session.play.score(env_wire.from_scored(request), request.answer)
                session.score = env_wire.to_score(verdict)
            return session.score

    async def Close(self, request: environment_pb2.CloseRequest, context: Any) -> environment_pb2.CloseResponse:
        await self._close(request.session_id)
        return environment_pb2.CloseResponse()

    async def close(self) -> None:
        """End every episode."""
        await asyncio.gather(*(self._close(session_id) for session_id in list(self._sessions)))

    def _session(self, session_id: str) -> _Session:
        """The open episode, which was used just now."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"No episode {session_id!r} is open.", session_id=session_id)
        self._sessions.move_to_end(session_id)
        return session

    async def _make_room(self) -> None:
        """Close the episodes that were left alone longest: a dead env_manager closes none."""
        while len(self._sessions) > self._max_sessions:
            await self._close(next(iter(self._sessions)))

    async def _close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.close()


def describe(name: str, kind: Kind) -> environment_pb2.EnvironmentInfo:
    """The environment as Describe tells it."""
    summary = (kind.__doc__ or "").strip().split("\n")[0]
    return environment_pb2.EnvironmentInfo(name=name, description=summary, max_turns=kind.max_turns)


def unknown_environment(name: str, known: Mapping[str, object]) -> UnknownEnvironment:
    """The error for a task whose environment is not among `known`."""
    return UnknownEnvironment(
        f"Unknown environment {name!r}.{nearest(name, list(known))}", environment=name, known=", ".join(sorted(known))
    )


def _read_action(request: environment_pb2.StepRequest) -> Action:
    try:
        return env_wire.from_action(request)
    except ValueError as error:
        raise InvalidArgument(f"Step {request.step}: {error}.", step=request.step) from None
