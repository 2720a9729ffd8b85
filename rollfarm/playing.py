"""Plays an environment in this process: on the loop or in a thread of the episode's own, with every answer checked."""

import asyncio
import contextlib
import functools
import inspect
import json
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog

from rollfarm import foreign, images
from rollfarm.config import ConfigError
from rollfarm.env import Action, Environment, Image, Kind, Observation, Step, ToolResult, name_of
from rollfarm.errors import EnvironmentFailed, FarmError, InvalidArgument, UnknownSession
from rollfarm.registry import check_settings
from rollfarm.reward import Turn

log = structlog.get_logger()

CLOSE_SECONDS = 10.0
"""How long closing one episode may take before it is not waited for any more."""


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

    def __init__(
        self, kind: Kind, settings: Mapping[str, Any], *, most_chars: int = 0, seconds: float | None = None
    ) -> None:
        """`most_chars` bounds what the environment shows at once, 0 does not; `seconds` how long it may take to answer,
        None does not."""
        self._kind = kind
        self._name = name_of(kind)
        self._settings = settings
        self._most_chars = most_chars
        self._seconds = seconds
        self._environment: Environment | None = None
        self._is_closed = False
        self._thread = None if kind.runs == "loop" else _Thread(self._name)

    async def reset(self, seed: int, index: int) -> Observation:
        begin = self._begin_async if inspect.iscoroutinefunction(self._kind.reset) else self._begin
        returned = await self._call("reset", begin, seed, index, seconds=self._seconds)
        return read_observation(self._name, returned, self._most_chars)

    async def step(self, action: Action) -> Step:
        return await self._judge("step", self._reset_environment.step, action)

    async def score(self, turns: Sequence[Turn], answer: str) -> Step:
        return await self._judge("score", self._reset_environment.score, turns, answer)

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let go within `seconds`. An environment that is still in a call is closed after it, and not waited for."""
        self._is_closed = True
        try:
            if self._thread is not None and self._thread.busy:
                self._thread.soon(functools.partial(self._close_late, asyncio.get_running_loop()))
            elif self._environment is not None and self._kind.close is not Environment.close:
                async with asyncio.timeout(seconds):
                    await self._call("close", self._environment.close)
        except TimeoutError:
            log.warning("environment hangs in close", environment=self._name, seconds=seconds)
        finally:
            if self._thread is not None:
                self._thread.stop()

    def _close_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread, after a call that nobody waits for any more: perhaps the one that made the environment."""
        if self._environment is None:
            return

        async def finish(closing: Awaitable[None]) -> None:
            await closing

        if (closing := self._environment.close()) is not None:
            asyncio.run_coroutine_threadsafe(finish(closing), loop)

    @property
    def _reset_environment(self) -> Environment:
        if self._environment is None or self._is_closed:
            raise UnknownSession("The episode was not reset, or is closed.")
        return self._environment

    async def _judge(self, what: str, method: Callable[..., Any], *args: Any) -> Step:
        returned = await self._call(what, method, *args, seconds=self._seconds)
        return read_step(self._name, returned, self._most_chars, what=what)

    def _begin(self, seed: int, index: int) -> Any:
        self._environment = self._kind(**self._settings)
        return self._environment.reset(seed, index)

    async def _begin_async(self, seed: int, index: int) -> Any:
        """One whose reset is async is made on the loop: it may never need a thread."""
        return await self._begin(seed, index)

    async def _call(self, what: str, method: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
        try:
            if self._thread is not None and not inspect.iscoroutinefunction(method):
                return await self._in_time(what, self._in_thread(self._thread, method, *args), seconds)
            answer = method(*args)
            return await self._in_time(what, answer, seconds) if inspect.isawaitable(answer) else answer
        except FarmError:  # it says itself what is wrong
            raise
        # Whatever an author's code raises is that episode's failure, and no one else's.
        except BaseException as error:
            if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
                raise
            log.warning("environment raised", environment=self._name, method=what, exception=traceback.format_exc())
            raise EnvironmentFailed(
                f"Environment {self._name}: {what} raised {foreign.cause(error)}.", environment=self._name
            ) from error

    async def _in_thread(self, thread: "_Thread", method: Callable[..., Any], *args: Any) -> Any:
        answer = await thread.call(method, *args)
        return await answer if inspect.isawaitable(answer) else answer

    async def _in_time(self, what: str, answer: Awaitable[Any], seconds: float | None) -> Any:
        """Only what is waited for can be late: what returns at once needs no timer."""
        patience = asyncio.timeout(seconds)
        try:
            async with patience:
                return await answer
        except TimeoutError:
            if not patience.expired():
                raise
            problem = f"Environment {self._name}: {what} gave no answer in {seconds:g} s."
            raise EnvironmentFailed(problem, environment=self._name) from None


def read_observation(environment: str, returned: object, most_chars: int = 0) -> Observation:
    """What the environment's reset returned. Raises EnvironmentFailed unless every field is what it should be.

    `most_chars` bounds all of it together; 0 does not.
    """
    shown = Observation(returned) if isinstance(returned, str) else returned
    try:
        if not isinstance(shown, Observation):
            raise ValueError(f"reset returned {type(shown).__name__}, not an Observation or a str")
        tools, tools_json = _tools(shown.tools)
        observation = Observation(
            text=foreign.text(shown.text, "the observation's text"),
            reference=foreign.text(shown.reference, "the observation's reference"),
            state_hash=foreign.text(shown.state_hash, "the observation's state_hash"),
            system=foreign.text(shown.system, "the observation's system"),
            tools=tools,
            images=_images(shown.images),
        )
        _bound(
            "reset",
            (observation.text, observation.reference, observation.state_hash, observation.system, tools_json),
            most_chars,
        )
        return observation
    except ValueError as error:
        raise EnvironmentFailed(f"Environment {environment}: {error}.", environment=environment) from None


def read_step(environment: str, returned: object, most_chars: int = 0, *, what: str = "step") -> Step:
    """What the environment's `what` returned. Raises EnvironmentFailed unless every field is what it should be.

    `most_chars` bounds all of it together; 0 does not.
    """
    try:
        if not isinstance(returned, Step):
            raise ValueError(f"{what} returned {type(returned).__name__}, not a Step")
        if not isinstance(returned.metrics, Mapping):
            raise ValueError(f"the step's metrics is {type(returned.metrics).__name__}, not a mapping")
        step = Step(
            text=foreign.text(returned.text, "the step's text"),
            reward=foreign.number(returned.reward, "the step's reward"),
            done=foreign.flag(returned.done, "the step's done"),
            truncated=foreign.flag(returned.truncated, "the step's truncated"),
            state_hash=foreign.text(returned.state_hash, "the step's state_hash"),
            metrics={
                foreign.text(name, "a metric's name"): foreign.number(value, f"the step's metric {name!r}")
                for name, value in returned.metrics.items()
            },
            tool_results=_tool_results(returned.tool_results),
            images=_images(returned.images),
        )
        texts = (step.text, step.state_hash, *(result.text for result in step.tool_results), *step.metrics)
        _bound(what, texts, most_chars)
        return step
    except ValueError as error:
        raise EnvironmentFailed(f"Environment {environment}: {error}.", environment=environment) from None


def _tools(value: object) -> tuple[list[Any], str]:
    """The tools as plain JSON, and that as text."""
    if not value:
        return [], ""
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError("the observation's tools is no list of mappings")
    try:
        text = foreign.text(json.dumps(list(value), ensure_ascii=False, allow_nan=False), "the observation's tools")
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the observation's tools is no JSON: {foreign.cause(error)}") from None
    return json.loads(text), text


def _tool_results(value: object) -> list[ToolResult]:
    if not isinstance(value, Sequence) or not all(isinstance(result, ToolResult) for result in value):
        raise ValueError("the step's tool_results is no list of ToolResults")
    return [
        ToolResult(
            tool_call_id=foreign.text(result.tool_call_id, "a tool result's tool_call_id"),
            name=foreign.text(result.name, "a tool result's name"),
            text=foreign.text(result.text, "a tool result's text"),
        )
        for result in value
    ]


def _images(value: object) -> list[Image]:
    """The images, each looked at from outside: what it holds is env_manager's to see."""
    if not isinstance(value, Sequence) or not all(isinstance(image, Image) for image in value):
        raise ValueError("its images is no list of Images")
    shown = [Image(bytes(image.data), image.media_type) for image in value]
    for image in shown:
        if image.media_type not in images.MEDIA_TYPES:
            raise ValueError(f"an image is {image.media_type!r}, not one of {', '.join(images.MEDIA_TYPES)}")
        if not 0 < len(image.data) <= images.MOST_BYTES:
            raise ValueError(f"an image has {len(image.data):,} bytes; 1 to {images.MOST_BYTES:,} are taken")
    return shown


def _bound(what: str, texts: Iterable[str], most_chars: int) -> None:
    count = sum(map(len, texts))
    if 0 < most_chars < count:
        raise ValueError(f"{what} gave {count:,} characters, more than the {most_chars:,} of max_observation_chars")


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
