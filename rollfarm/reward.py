"""For authors of rewards: a function of a finished episode.

    def brevity(episode: Episode, *, most: int = 100) -> float:
        return max(0.0, 1 - len(episode.answer) / most)

Name it in the farm's file as "my_lab.rewards:brevity", where its keyword-only parameters are its settings; or run it as
a server of its own, which the farm reaches by [reward_gateway.external.NAME]:

    if __name__ == "__main__":
        serve(brevity)

It may be async. Raise where there is nothing to judge by: the episode is then played again, and is never scored 0.
"""

import argparse
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from grpc import aio

from rollfarm import foreign, service
from rollfarm.config import Listen, Telemetry
from rollfarm.errors import RewardFailed
from rollfarm.telemetry import configure_logging
from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc, trajectory_pb2

SERVICE = "rollfarm.v1.RewardService"

Author = Literal["system", "environment", "policy"]

_AUTHORS: dict[int, Author] = {
    trajectory_pb2.AUTHOR_SYSTEM: "system",
    trajectory_pb2.AUTHOR_ENVIRONMENT: "environment",
    trajectory_pb2.AUTHOR_POLICY: "policy",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as text."""

    author: Author
    """Who wrote it."""

    text: str
    """What."""

    step_reward: float | None = None
    """What the environment paid for it; None where it did not answer."""


@dataclass(frozen=True)
class Episode:
    """What a reward sees of a finished episode."""

    turns: Sequence[Turn] = ()
    """In order."""

    reference: str = ""
    """The right answer, where the environment gave one."""

    domain: str = ""
    """The domain of its task."""

    environment: str = ""
    """What played it."""

    seed: int = 0
    """Of its task."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its task."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured."""

    truncated: bool = False
    """Whether a limit ended it."""

    @property
    def answer(self) -> str:
        """The policy's last words; empty when it said none."""
        return next((turn.text for turn in reversed(self.turns) if turn.author == "policy"), "")


@dataclass(frozen=True, slots=True)
class Score:
    """A verdict with its reason."""

    value: float
    """Finite."""

    detail: str = ""
    """Why, in words."""


Reward = Callable[..., float | Score | Awaitable[float | Score]]


def read_episode(episode: reward_gateway_pb2.ScoredEpisode) -> Episode:
    """The episode as reward functions take it."""
    return Episode(
        turns=[
            Turn(
                author=_AUTHORS.get(turn.author, "environment"),
                text=turn.text,
                step_reward=turn.step_reward if turn.HasField("step_reward") else None,
            )
            for turn in episode.turns
        ],
        reference=episode.reference,
        domain=episode.task.domain,
        environment=episode.task.environment,
        seed=episode.task.seed,
        settings=json.loads(episode.task.settings_json or "{}"),
        metrics=dict(episode.metrics),
        truncated=episode.outcome == trajectory_pb2.OUTCOME_TRUNCATED,
    )


def read_score(name: str, returned: object) -> Score:
    """What the reward called `name` returned. Raises RewardFailed unless it is a finite number, with or without why."""
    value, detail = (returned.value, returned.detail) if isinstance(returned, Score) else (returned, "")
    try:
        return Score(foreign.number(value, "the score"), foreign.text(detail, "the score's detail"))
    except ValueError as error:
        raise RewardFailed(f"Reward {name}: {error}.", reward=name) from None


async def score(name: str, function: Reward, episode: Episode) -> Score:
    """Call the reward here and now. Whatever it raises becomes RewardFailed with the cause."""
    try:
        returned = function(episode)
        if inspect.isawaitable(returned):
            returned = await returned
    except (Exception, SystemExit) as error:  # whatever an author's code raises is that score's failure
        raise RewardFailed(f"Reward {name} raised {foreign.cause(error)}.", reward=name) from error
    return read_score(name, returned)


class RewardServicer(reward_gateway_pb2_grpc.RewardServiceServicer):
    """Serves one reward under any name."""

    def __init__(self, function: Reward) -> None:
        self._function = function

    def register(self, server: aio.Server) -> None:
        reward_gateway_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    async def Score(
        self, request: reward_gateway_pb2.RewardServiceScoreRequest, context: Any
    ) -> reward_gateway_pb2.RewardServiceScoreResponse:
        verdict = await score(request.reward, self._function, read_episode(request.episode))
        return reward_gateway_pb2.RewardServiceScoreResponse(value=verdict.value, detail=verdict.detail)


def serve(function: Reward, *, argv: Sequence[str] | None = None) -> NoReturn:
    """Serve the reward until SIGTERM, as the command line says: --host, --port."""
    parser = argparse.ArgumentParser(description="Serves a reward to reward_gateway")
    parser.add_argument("--host", default="127.0.0.1", help="interface; 0.0.0.0 is all of them (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7740, help="0 lets the system choose (default: %(default)s)")
    options = parser.parse_args(argv)
    configure_logging("reward", Telemetry())
    server = RewardServicer(function)
    listen = Listen(host=options.host, port=options.port)
    service.run(lambda: service.serve(server.register, listen, services=[SERVICE]))
