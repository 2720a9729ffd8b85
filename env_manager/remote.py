"""Environment servers that env_manager dials, in any language."""

import time
from collections.abc import Sequence
from typing import Any

import structlog

from rollfarm import rpc
from rollfarm.env import Observation, Step, read_observation, read_step
from rollfarm.errors import EnvironmentFailed, FarmError
from rollfarm.v1 import environment_pb2, trajectory_pb2

log = structlog.get_logger()

DESCRIBE_SECONDS = 10.0
"""How long a server that is not there is waited for before that is logged, and tried again."""

CLOSE_SECONDS = 2.0
"""How long a server may take to acknowledge the end of an episode. It is not needed: servers drop idle episodes."""

REST_SECONDS = 5.0
"""How long other servers are preferred to one that failed."""


class Server:
    """One environment server."""

    def __init__(self, address: str, stub: Any) -> None:
        """`stub` is an EnvironmentServiceStub on an aio channel."""
        self.address = address
        self.stub = stub
        self.environments: frozenset[str] = frozenset()
        self.is_described = False
        self.open_count = 0
        self._failed_at = float("-inf")

    @property
    def is_resting(self) -> bool:
        """Whether it failed just now."""
        return time.monotonic() - self._failed_at < REST_SECONDS

    async def describe(self) -> None:
        """Ask what it plays, until it answers."""
        while True:
            try:
                answer = await rpc.call(self.stub.Describe, environment_pb2.DescribeRequest(), timeout=DESCRIBE_SECONDS)
                break
            except FarmError as error:
                if error.reason not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                log.warning("environment server is not there", server=self.address, cause=str(error))
        self.environments = frozenset(info.name for info in answer.environments)
        self.is_described = True
        log.info("environment server found", server=self.address, environments=sorted(self.environments))

    async def call(self, method: Any, request: Any, seconds: float) -> Any:
        """Call it, and remember whether it failed."""
        try:
            answer = await rpc.call(method, request, timeout=seconds)
        except FarmError as error:
            self._failed_at = time.monotonic()
            raise EnvironmentFailed(f"Environment server {self.address}: {error}", server=self.address) from error
        if answer is None:  # gRPC's way to say that it could not parse
            raise EnvironmentFailed(
                f"Environment server {self.address}: its answer is no valid message; text is UTF-8.",
                server=self.address,
            )
        return answer


class RemoteWorld:
    """One episode on a server."""

    def __init__(self, server: Server, session_id: str, task: trajectory_pb2.Task, seconds: float) -> None:
        self.environment_id = server.address
        self._name = f"{task.environment} at {server.address}"
        self._server = server
        self._session_id = session_id
        self._task = task
        self._seconds = seconds
        self._step = 0
        server.open_count += 1

    async def reset(self) -> Observation:
        request = environment_pb2.ResetRequest(session_id=self._session_id, task=self._task)
        answer = await self._server.call(self._server.stub.Reset, request, self._seconds)
        shown = Observation(
            text=_text(self._only_text(answer.messages), trajectory_pb2.AUTHOR_ENVIRONMENT),
            system=_text(answer.messages, trajectory_pb2.AUTHOR_SYSTEM),
            reference=answer.reference,
            state_hash=answer.state_hash,
        )
        return read_observation(self._name, shown)

    async def step(self, action: str) -> Step:
        request = environment_pb2.StepRequest(session_id=self._session_id, step=self._step, action=action)
        answer = await self._server.call(self._server.stub.Step, request, self._seconds)
        self._step += 1
        step = Step(
            text=_text(self._only_text(answer.messages), trajectory_pb2.AUTHOR_ENVIRONMENT),
            reward=answer.reward,
            done=answer.done,
            truncated=answer.truncated,
            state_hash=answer.state_hash,
            metrics=answer.metrics,
        )
        return read_step(self._name, step)

    async def close(self) -> None:
        self._server.open_count -= 1
        request = environment_pb2.CloseRequest(session_id=self._session_id)
        try:
            await rpc.call(self._server.stub.Close, request, timeout=CLOSE_SECONDS, retry=False)
        except FarmError as error:
            log.debug("episode not closed", server=self._server.address, cause=str(error))

    def _only_text(self, messages: Sequence[environment_pb2.Message]) -> Sequence[environment_pb2.Message]:
        if any(message.images for message in messages):
            raise EnvironmentFailed(
                f"Environment server {self._server.address} shows images, and env_manager renders text alone.",
                server=self._server.address,
            )
        return messages


def _text(messages: Sequence[environment_pb2.Message], author: "trajectory_pb2.Author.ValueType") -> str:
    return "\n\n".join(message.text for message in messages if message.author == author)
