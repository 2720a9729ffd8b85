"""For authors of rewards: a function of a finished episode.

    def brevity(episode: Episode, *, most: int = 100) -> float:
        return max(0.0, 1 - len(episode.answer) / most)

Name it in the farm's file as "my_lab.rewards:brevity", where its keyword-only parameters are its settings; or run it as
a server of its own, which the farm reaches by [reward_gateway.external.NAME]:

    if __name__ == "__main__":
        serve(brevity)

It may be async. Raise where there is nothing to judge by: the episode is then played again, and is never scored 0.
Raise TryAgain where another attempt may succeed. `@pure` lets a score be remembered, and `@compares` marks a function
of a whole group:

    @compares
    def shorter(episodes: Sequence[Episode]) -> list[float]:
        longest = max(len(episode.answer) for episode in episodes)
        return [longest - len(episode.answer) for episode in episodes]
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from rollfarm import foreign
from rollfarm.errors import RewardFailed
from rollfarm.v1 import reward_gateway_pb2, trajectory_pb2

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


Verdict = float | Score

Reward = Callable[..., Verdict | Awaitable[Verdict] | Sequence[Verdict] | Awaitable[Sequence[Verdict]]]
"""Of an episode; or, where it `compares`, of a sequence of them, with a verdict for each."""

F = TypeVar("F", bound=Reward)


class TryAgain(RewardFailed):
    """There is no score, and another attempt may give one: a judge's words that cannot be read, a service that is busy.

    Raised by rewards; reward_gateway asks again a few times before it fails the episode.
    """

    def __init__(self, problem: str, **facts: object) -> None:
        super().__init__(problem, **{**facts, "again": True})


def may_pass(failure: RewardFailed) -> bool:
    """Whether another attempt may give a score."""
    return "again" in failure.facts


def compares(function: F) -> F:
    """Mark a function that takes all episodes of a group, at least two, and returns a verdict for each, in order."""
    function.__dict__["compares"] = True
    return function


def is_comparison(function: Reward) -> bool:
    """Whether it takes all episodes of a group."""
    return function.__dict__.get("compares", False)


def pure(function: F) -> F:
    """Mark a function that always gives the same episode the same score, which may therefore be remembered."""
    function.__dict__["pure"] = True
    return function


def is_pure(function: Reward) -> bool:
    """Whether its scores may be remembered."""
    return function.__dict__.get("pure", False)


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
    return read_score(name, await _returned(name, function, episode))


async def score_group(name: str, function: Reward, episodes: Sequence[Episode]) -> list[Score]:
    """Call the reward that compares here and now. Raises RewardFailed, also for another number of verdicts."""
    returned = await _returned(name, function, episodes)
    try:
        verdicts = list(returned)
    except TypeError:
        kind = type(returned).__name__
        raise RewardFailed(f"Reward {name}: returned {kind}, not one verdict for each episode.", reward=name) from None
    return read_scores(name, verdicts, len(episodes))


def read_scores(name: str, returned: Sequence[object], count: int) -> list[Score]:
    """What a comparison of `count` episodes gave. Raises RewardFailed unless each has a finite number."""
    if len(returned) != count:
        raise RewardFailed(f"Reward {name}: {len(returned)} verdicts for {count} episodes.", reward=name)
    return [read_score(name, verdict) for verdict in returned]


async def _returned(name: str, function: Reward, argument: Episode | Sequence[Episode]) -> Any:
    try:
        returned = function(argument)
        return await returned if inspect.isawaitable(returned) else returned
    except TryAgain as error:
        raise TryAgain(f"Reward {name}: {error.problem}", reward=name) from error
    except (Exception, SystemExit) as error:  # whatever an author's code raises is that score's failure
        raise RewardFailed(f"Reward {name} raised {foreign.cause(error)}.", reward=name) from error


def pack_score(score: Score) -> reward_gateway_pb2.RewardServiceScoreResponse:
    """The score as a scorer sends it."""
    return reward_gateway_pb2.RewardServiceScoreResponse(value=score.value, detail=score.detail)


def pack_scores(scores: Sequence[Score]) -> reward_gateway_pb2.ScoreGroupResponse:
    """The scores as a scorer that compares sends them."""
    return reward_gateway_pb2.ScoreGroupResponse(verdicts=[pack_score(score) for score in scores])


def unpack_scores(name: str, answer: reward_gateway_pb2.ScoreGroupResponse, count: int) -> list[Score]:
    """The scores of `count` episodes as a scorer sent them. Raises RewardFailed as `read_scores` does."""
    return read_scores(name, [Score(verdict.value, verdict.detail) for verdict in answer.verdicts], count)


def serve(function: Reward, *, argv: Sequence[str] | None = None) -> NoReturn:
    """Serve the reward until SIGTERM, as the command line says: --host, --port."""
    from rollfarm.reward_server import main  # here, because a reward that is not served needs none of it

    main(function, argv)
