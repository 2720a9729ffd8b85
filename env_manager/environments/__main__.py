"""Prints how well chance and the solver play each built-in environment: `python -m env_manager.environments`."""

import argparse
import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from env_manager.environments import ENVIRONMENTS
from env_manager.environments.solvable import Solvable
from env_manager.playthrough import Playthrough, play
from rollfarm.config import Telemetry
from rollfarm.telemetry import configure_logging


@dataclass(frozen=True, slots=True)
class Score:
    """An environment's, with its default settings."""

    environment: str
    random_reward: float
    """Mean over the episodes, of actions taken at random from those that the environment names."""
    random_success: float
    solver_reward: float
    solver_success: float
    steps_per_s: float
    """At random, one episode after the other, resets included."""


async def score(name: str, episodes: int) -> Score:
    chance = random.Random(0)
    guessed = await _episodes(name, episodes, lambda environment: chance.choice(environment.actions()))
    solved = await _episodes(name, episodes, lambda environment: environment.solve())
    return Score(
        environment=name,
        random_reward=fmean(episode.reward for episode in guessed),
        random_success=fmean(episode.success for episode in guessed),
        solver_reward=fmean(episode.reward for episode in solved),
        solver_success=fmean(episode.success for episode in solved),
        steps_per_s=sum(len(episode.turns) for episode in guessed) / sum(episode.seconds for episode in guessed),
    )


async def _episodes(name: str, count: int, act: Callable[[Solvable], str]) -> list[Playthrough]:
    return [await play(ENVIRONMENTS[name](), seed, act) for seed in range(count)]


async def print_scores(names: list[str], episodes: int, *, as_json: bool) -> None:
    scores: list[Score] = []
    if not as_json:
        print(f"{'environment':14}{'random':>8}{'success':>9}{'solver':>8}{'success':>9}{'steps/s':>10}")
    for name in names:
        scores.append(it := await score(name, episodes))
        if not as_json:
            print(
                f"{name:14}{it.random_reward:8.2f}{it.random_success:9.0%}{it.solver_reward:8.2f}"
                f"{it.solver_success:9.0%}{it.steps_per_s:10,.0f}",
                flush=True,
            )
    if as_json:
        print(json.dumps([dataclasses.asdict(it) for it in scores]))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m env_manager.environments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments (default: all that are built in)")
    parser.add_argument("--episodes", type=int, default=100, help="of each, for each player (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line for programs")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    if options.episodes < 1:
        parser.error("--episodes: at least 1")
    configure_logging("environments", Telemetry(log_level="warning"))
    asyncio.run(print_scores(options.names or list(ENVIRONMENTS), options.episodes, as_json=options.json))


if __name__ == "__main__":
    main(sys.argv[1:])
