"""One episode on a host: a server, a worker that dialled in, or a process."""

from collections.abc import Sequence

import structlog

from env_manager.hosts import Host
from rollfarm import env_wire
from rollfarm.env import Action, Observation, Step
from rollfarm.errors import EnvironmentFailed, FarmError
from rollfarm.playing import read_observation, read_step
from rollfarm.reward import Turn
from rollfarm.v1 import environment_pb2, trajectory_pb2

log = structlog.get_logger()

CLOSE_SECONDS = 2.0
"""How long a host may take to acknowledge the end of an episode. It is not needed: hosts drop idle episodes."""


class RemoteWorld:
    """One episode on a host, which counts it until it is closed."""

    __slots__ = ("_host", "_most_chars", "_name", "_seconds", "_session_id", "_step", "_task", "environment_id")

    def __init__(
        self, host: Host, session_id: str, task: trajectory_pb2.Task, seconds: float, *, most_chars: int = 0
    ) -> None:
        """`most_chars` bounds what the environment shows at once; 0 does not."""
        self.environment_id = host.address
        self._name = f"{task.environment} at {host.address}"
        self._host = host
        self._session_id = session_id
        self._task = task
        self._seconds = seconds
        self._most_chars = most_chars
        self._step = 0
        host.open_count += 1

    async def reset(self) -> Observation:
        request = environment_pb2.ResetRequest(session_id=self._session_id, task=self._task)
        answer = await self._host.ask(request, self._seconds)
        try:
            shown = env_wire.from_reset(answer)
        except ValueError as error:
            raise self._senseless(error) from None
        return read_observation(self._name, shown, self._most_chars)

    async def step(self, action: Action) -> Step:
        answer = await self._host.ask(env_wire.to_action(self._session_id, self._step, action), self._seconds)
        self._step += 1
        try:
            step = env_wire.from_step(answer)
        except ValueError as error:
            raise self._senseless(error) from None
        return read_step(self._name, step, self._most_chars)

    async def score(self, turns: Sequence[Turn], answer: str) -> Step:
        """The host's verdict. Where it knows no Score, the answer is the one step."""
        try:
            verdict = await self._host.ask(env_wire.to_scored(self._session_id, turns, answer), self._seconds)
        except EnvironmentFailed as error:
            if isinstance(error.__cause__, FarmError) and error.__cause__.reason == "UNIMPLEMENTED":
                return await self.step(Action(answer))
            raise
        return read_step(self._name, env_wire.from_score(verdict), self._most_chars, what="score")

    async def close(self) -> None:
        try:
            if self._host.is_healthy:
                await self._host.ask(environment_pb2.CloseRequest(session_id=self._session_id), CLOSE_SECONDS)
        except FarmError as error:
            log.debug("episode not closed", host=self._host.address, cause=str(error))
        finally:
            self._host.free()

    def _senseless(self, problem: ValueError) -> EnvironmentFailed:
        return EnvironmentFailed(f"Environment {self._name}: {problem}.", environment=self._name)
