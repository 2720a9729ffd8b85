"""For authors of environments: write a class, call `serve`, and any farm can play it.

    class Coin(Environment):
        "Call heads or tails."

        def reset(self, seed: int, index: int) -> str:
            self.side = random.Random(seed).choice(["heads", "tails"])
            return "heads or tails"

        def step(self, action: str) -> Step:
            return Step("", reward=float(action.strip() == self.side), done=True)

    if __name__ == "__main__":
        serve(Coin)

An object of the class plays one episode. Keyword parameters of the constructor are the settings that a domain may give.
Equal seed and settings must give an equal episode. Methods may be async; those that are not run in a thread of the
episode's own, so a slow one disturbs nobody.
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import queue
import re
import threading
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import structlog
from grpc import aio

from rollfarm import foreign, service
from rollfarm.config import ConfigError, Listen, Telemetry, nearest
from rollfarm.errors import EnvironmentFailed, InvalidArgument, UnknownEnvironment, UnknownSession
from rollfarm.registry import check_settings
from rollfarm.telemetry import configure_logging
from rollfarm.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

log = structlog.get_logger()

SERVICE = "rollfarm.v1.EnvironmentService"

CLOSE_SECONDS = 10.0
"""How long closing one episode may take before it is not waited for any more."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The first thing that the policy sees."""

    text: str
    """What the environment shows."""

    reference: str = ""
    """The right answer, for rewards that compare; never shown to the policy."""

    state_hash: str = ""
    """Identifies the state; empty where unknown."""

    system: str = ""
    """Instructions before everything else; empty is none."""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to an action."""

    text: str = ""
    """What the policy sees next; may be empty when done."""

    reward: float = 0.0
    """What the action earned."""

    done: bool = False
    """Whether the episode is over by the environment's own rules."""

    truncated: bool = False
    """Whether a limit of the environment cut it short."""

    state_hash: str = ""
    """Identifies the new state; empty where unknown."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measures of the episode so far, by name, for example "success"."""


class Environment(ABC):
    """One episode of a world. See the module for how to write one."""

    name: ClassVar[str] = ""
    """What tasks call it; empty is the class's name in snake_case."""

    max_turns: ClassVar[int] = 0
    """Most turns of an episode; 0 is without a limit of its own."""

    fast: ClassVar[bool] = False
    """Whether every method returns within microseconds and may run on the event loop itself."""

    @abstractmethod
    def reset(self, seed: int, index: int) -> Observation | str | Awaitable[Observation | str]:
        """Start the episode of the task at `index` of its domain; everything random comes from `seed`."""

    @abstractmethod
    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer what the policy wrote."""

    def close(self) -> Awaitable[None] | None:
        """Let go of resources. Called once, also when the episode ends early. One that hangs is not waited for."""
        return None


Kind = type[Environment]


def name_of(kind: Kind) -> str:
    """What tasks call the environment."""
    return kind.name or re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def read_settings(kind: Kind, settings_json: str) -> dict[str, Any]:
    """The settings of a task as `kind` takes them. Raises InvalidArgument, which lists the known ones."""
    try:
        settings = json.loads(settings_json or "{}")
        if not isinstance(settings, dict):
            raise ConfigError(f"{name_of(kind)}: settings are {settings_json!r}, not a JSON object.")
        return check_settings(kind, settings, owner=name_of(kind))
    except (ConfigError, json.JSONDecodeError) as error:
        raise InvalidArgument(f"{error}", environment=name_of(kind)) from None


class Play:
    """One environment being played. Whatever it raises becomes EnvironmentFailed with the cause."""

    def __init__(self, kind: Kind, settings: Mapping[str, Any]) -> None:
        self._kind = kind
        self._settings = settings
        self._environment: Environment | None = None
        self._thread = None if kind.fast else _Thread(name_of(kind))

    async def reset(self, seed: int, index: int) -> Observation:
        return read_observation(name_of(self._kind), await self._call("reset", self._begin, seed, index))

    async def step(self, action: str) -> Step:
        if self._environment is None:
            raise UnknownSession("The episode was not reset.")
        return read_step(name_of(self._kind), await self._call("step", self._environment.step, action))

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let go within `seconds`. An environment that is still in a call is closed after it, and not waited for."""
        environment, self._environment = self._environment, None
        try:
            if environment is not None and self._thread is not None and self._thread.busy:
                self._thread.soon(environment.close)
            elif environment is not None:
                async with asyncio.timeout(seconds):
                    await self._call("close", environment.close)
        except TimeoutError:
            log.warning("environment hangs in close", environment=name_of(self._kind), seconds=seconds)
        finally:
            if self._thread is not None:
                self._thread.stop()

    def _begin(self, seed: int, index: int) -> Any:
        self._environment = self._kind(**self._settings)
        return self._environment.reset(seed, index)

    async def _call(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._thread is None or inspect.iscoroutinefunction(method):
                answer = method(*args)
            else:
                answer = await self._thread.call(method, *args)
            return await answer if inspect.isawaitable(answer) else answer
        # Whatever an author's code raises is that episode's failure, and no one else's.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            name = name_of(self._kind)
            log.warning("environment raised", environment=name, method=what, exception=traceback.format_exc())
            raise EnvironmentFailed(
                f"Environment {name}: {what} raised {foreign.cause(error)}.", environment=name
            ) from error


def read_observation(environment: str, returned: object) -> Observation:
    """What the environment's reset returned. Raises EnvironmentFailed unless every field is what it should be."""
    shown = Observation(returned) if isinstance(returned, str) else returned
    try:
        if not isinstance(shown, Observation):
            raise ValueError(f"reset returned {type(shown).__name__}, not an Observation or a str")
        return Observation(
            text=foreign.text(shown.text, "the observation's text"),
            reference=foreign.text(shown.reference, "the observation's reference"),
            state_hash=foreign.text(shown.state_hash, "the observation's state_hash"),
            system=foreign.text(shown.system, "the observation's system"),
        )
    except ValueError as error:
        raise EnvironmentFailed(f"Environment {environment}: {error}.", environment=environment) from None


def read_step(environment: str, returned: object) -> Step:
    """What the environment's step returned. Raises EnvironmentFailed unless every field is what it should be."""
    try:
        if not isinstance(returned, Step):
            raise ValueError(f"step returned {type(returned).__name__}, not a Step")
        if not isinstance(returned.metrics, Mapping):
            raise ValueError(f"the step's metrics is {type(returned.metrics).__name__}, not a mapping")
        return Step(
            text=foreign.text(returned.text, "the step's text"),
            reward=foreign.number(returned.reward, "the step's reward"),
            done=foreign.flag(returned.done, "the step's done"),
            truncated=foreign.flag(returned.truncated, "the step's truncated"),
            state_hash=foreign.text(returned.state_hash, "the step's state_hash"),
            metrics={
                foreign.text(name, "a metric's name"): foreign.number(value, f"the step's metric {name!r}")
                for name, value in returned.metrics.items()
            },
        )
    except ValueError as error:
        raise EnvironmentFailed(f"Environment {environment}: {error}.", environment=environment) from None


def _is_cancelled() -> bool:
    """Whether somebody cancels this task, or its time is up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Thread:
    """A daemon thread that makes one episode's calls in order. One that hangs holds up no other, nor the exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._started = False
        self._open = 0

    @property
    def busy(self) -> bool:
        """Whether a call was made that has not returned."""
        return self._open > 0

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def run() -> None:
            try:
                outcome = method(*args), None
            except BaseException as error:  # carried to the caller
                outcome = None, error
            self._open -= 1
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, answer, outcome)

        self._open += 1
        self._calls.put(run)
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=f"environment-{self._name}", daemon=True).start()
        returned, raised = await answer
        if raised is not None:
            raise raised
        return returned

    def soon(self, method: Callable[[], Any]) -> None:
        """Call `method` after what was called before, and forget it."""
        self._calls.put(method)

    def stop(self) -> None:
        """End the thread after what was called before."""
        self._calls.put(None)

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


@dataclass
class _Session:
    play: Play
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    reset: environment_pb2.ResetResponse | None = None
    step_number: int = -1
    step: environment_pb2.StepResponse | None = None


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Serves environments. A retried call gets the first answer; calls of one episode run one at a time."""

    def __init__(self, kinds: Sequence[Kind], *, max_sessions: int = 10_000) -> None:
        self._kinds = {name_of(kind): kind for kind in kinds}
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def register(self, server: aio.Server) -> None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def Describe(
        self, request: environment_pb2.DescribeRequest, context: Any
    ) -> environment_pb2.DescribeResponse:
        return environment_pb2.DescribeResponse(environments=[describe(kind) for kind in self._kinds.values()])

    async def Reset(self, request: environment_pb2.ResetRequest, context: Any) -> environment_pb2.ResetResponse:
        kind = self._kinds.get(request.task.environment)
        if kind is None:
            raise unknown_environment(request.task.environment, self._kinds)
        session = self._sessions.get(request.session_id)
        if session is None:
            session = _Session(Play(kind, read_settings(kind, request.task.settings_json)))
            self._sessions[request.session_id] = session
            await self._make_room()
        async with session.lock:
            if session.reset is None:
                shown = await session.play.reset(request.task.seed, request.task.index)
                session.reset = _reset_response(shown)
            return session.reset

    async def Step(self, request: environment_pb2.StepRequest, context: Any) -> environment_pb2.StepResponse:
        session = self._sessions.get(request.session_id)
        if session is None:
            raise UnknownSession(f"No episode {request.session_id!r} is open.", session_id=request.session_id)
        self._sessions.move_to_end(request.session_id)
        async with session.lock:
            if request.step == session.step_number and session.step is not None:
                return session.step
            if request.step != session.step_number + 1:
                raise InvalidArgument(
                    f"Step {request.step} does not follow step {session.step_number}.",
                    step=request.step,
                    last_step=session.step_number,
                )
            step = await session.play.step(request.action)
            session.step_number, session.step = request.step, _step_response(step)
            return session.step

    async def Close(self, request: environment_pb2.CloseRequest, context: Any) -> environment_pb2.CloseResponse:
        await self._close(request.session_id)
        return environment_pb2.CloseResponse()

    async def _make_room(self) -> None:
        """Close the episodes that were left alone longest: a dead env_manager closes none."""
        while len(self._sessions) > self._max_sessions:
            await self._close(next(iter(self._sessions)))

    async def _close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.play.close()


def describe(kind: Kind) -> environment_pb2.EnvironmentInfo:
    """The environment as Describe tells it."""
    summary = (kind.__doc__ or "").strip().split("\n")[0]
    return environment_pb2.EnvironmentInfo(name=name_of(kind), description=summary, max_turns=kind.max_turns)


def unknown_environment(name: str, known: Mapping[str, object]) -> UnknownEnvironment:
    """The error for a task whose environment is not among `known`."""
    return UnknownEnvironment(
        f"Unknown environment {name!r}.{nearest(name, list(known))}", environment=name, known=", ".join(sorted(known))
    )


def _reset_response(shown: Observation) -> environment_pb2.ResetResponse:
    messages = [environment_pb2.Message(author=trajectory_pb2.AUTHOR_ENVIRONMENT, text=shown.text)]
    if shown.system:
        messages.insert(0, environment_pb2.Message(author=trajectory_pb2.AUTHOR_SYSTEM, text=shown.system))
    return environment_pb2.ResetResponse(messages=messages, reference=shown.reference, state_hash=shown.state_hash)


def _step_response(step: Step) -> environment_pb2.StepResponse:
    messages = [environment_pb2.Message(author=trajectory_pb2.AUTHOR_ENVIRONMENT, text=step.text)] if step.text else []
    return environment_pb2.StepResponse(
        messages=messages,
        reward=step.reward,
        done=step.done,
        truncated=step.truncated,
        state_hash=step.state_hash,
        metrics=step.metrics,
    )


def serve(*kinds: Kind, argv: Sequence[str] | None = None) -> NoReturn:
    """Serve the environments until SIGTERM, as the command line says: --host, --port, --max-sessions."""
    parser = argparse.ArgumentParser(description="Serves to env_manager: " + ", ".join(map(name_of, kinds)))
    parser.add_argument("--host", default="127.0.0.1", help="interface; 0.0.0.0 is all of them (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7730, help="0 lets the system choose (default: %(default)s)")
    parser.add_argument(
        "--max-sessions",
        type=int,
        default=10_000,
        help="episodes held; beyond it the longest idle is closed (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    configure_logging("environment", Telemetry())
    server = EnvironmentServicer(kinds, max_sessions=options.max_sessions)
    listen = Listen(host=options.host, port=options.port)
    service.run(lambda: service.serve(server.register, listen, services=[SERVICE]))
