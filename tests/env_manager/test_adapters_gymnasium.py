"""Gymnasium's worlds, told in words."""

import random
import string
from typing import Any

import gymnasium
import numpy
import pytest

from env_manager.adapters.gymnasium import Gymnasium
from rollfarm.env import Observation, Step
from rollfarm.errors import InvalidArgument
from tests.env_manager.adapted import GARBAGE, play

DETERMINED = ["CliffWalking-v1"]
TOYS = ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"]


class Odd(gymnasium.Env[Any, Any]):
    """Takes what its spaces say, and pays 1 for it."""

    def __init__(self, *, space: gymnasium.Space[Any]) -> None:
        self.action_space = space
        self.observation_space = gymnasium.spaces.Dict(
            {
                "word": gymnasium.spaces.Text(99, charset=string.printable),
                "pair": gymnasium.spaces.MultiDiscrete([3, 3]),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return {"word": "hello", "pair": self.np_random.integers(0, 3, 2)}, {}

    def step(self, action: Any) -> Any:
        self.taken = action
        return {"word": str(action), "pair": numpy.array([1, 2])}, 1.0, True, False, {}


gymnasium.register("rollfarm/Odd-v0", entry_point=lambda **settings: Odd(**settings), disable_env_checker=True)


def moves(*words: str) -> Any:
    plan = iter(words)
    return lambda shown: next(plan)


def test_a_lake_is_crossed_by_the_names_of_the_moves_for_the_one_reward_there_is():
    lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False})

    played = play(lake, moves("down", "I go DOWN.", "right", "right", "down", "right"))

    assert played.shown[0].endswith("PFFF\nFHFH\nFFFH\nHFFG\nAnswer with one of: left, down, right, up.")
    assert played.shown[1] == "SFFF\nPHFH\nFFFH\nHFFG"
    assert played.reward == 1.0
    assert (played.last.done, played.last.truncated) == (True, False)


def test_names_of_the_settings_take_the_place_of_the_usual_ones():
    lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False}, actions=["W", "S", "E", "N"])

    played = play(lake, moves("S", "S", "E", "E", "S", "E"))

    assert played.reward == 1.0
    assert "Answer with one of: W, S, E, N." in played.shown[0]


def test_what_cannot_be_read_is_told_what_is_allowed_and_ends_the_episode_when_it_goes_on():
    lake = Gymnasium(id="FrozenLake-v1", mistakes=2, mistake_reward=-0.5)

    played = play(lake, lambda shown: "left or right?")

    assert played.shown[1:] == ["Answer with one of: left, down, right, up."] * 3
    assert played.reward == -1.5
    assert played.last.truncated


def test_one_readable_action_forgives_those_before_it():
    lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False}, mistakes=1)

    played = play(lake, moves("?", "left", "?", "left", "?", "?"))

    assert len(played.shown) == 7
    assert played.last.truncated


def test_the_world_s_limit_and_the_one_of_the_settings_cut_short():
    lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False}, turns=3)

    played = play(lake, lambda shown: "left")

    assert len(played.shown) == 4
    assert played.last.truncated


@pytest.mark.parametrize("id", [*TOYS, "CartPole-v1"])
def test_equal_seeds_give_equal_episodes_and_other_seeds_others(id: str):
    def once(seed: int) -> list[str]:
        chance = random.Random(0)

        def act(shown: str) -> str:
            return chance.choice(world._names)

        world = Gymnasium(id=id)
        return play(world, act, seed=seed, turns=30).shown

    assert once(3) == once(3)
    assert id in DETERMINED or len({tuple(once(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("id", TOYS)
def test_garbage_never_breaks_a_world(id: str):
    chance = random.Random(1)
    world = Gymnasium(id=id, mistakes=5)

    played = play(world, lambda shown: chance.choice([*GARBAGE, *world._names]), turns=300)

    assert played.last.done


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 + 5, 2**63 - 1])
def test_any_seed_of_a_task_will_do(seed: int):
    assert play(Gymnasium(id="Blackjack-v1"), lambda shown: "stick", seed=seed).last.done


@pytest.mark.parametrize(
    ("space", "action", "allowed"),
    [
        (gymnasium.spaces.MultiDiscrete([2, 5]), "1 and 4", "Answer with numbers from 0, one each below 2 5."),
        (gymnasium.spaces.MultiBinary(3), "0 1 1", "Answer with numbers from 0, one each below 2 2 2."),
        (gymnasium.spaces.Text(5, charset="ab"), "abba", "Answer with 1 to 5 characters."),
        (gymnasium.spaces.Discrete(2, start=3), "4", "Answer with one of: 3, 4."),
    ],
)
def test_other_spaces_are_told_in_numbers_and_text(space: Any, action: str, allowed: str):
    world = Gymnasium(id="rollfarm/Odd-v0", options={"space": space})

    observation = world.reset(0, 0)
    refused = world.step("7 8 999 x")
    taken = world.step(action)

    assert isinstance(observation, Observation)
    assert observation.text.startswith("pair: ") or observation.text.startswith("word: hello")
    assert allowed in observation.text
    assert refused == Step(allowed)
    assert (taken.reward, taken.done) == (1.0, True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"id": "Nowhere-v0"}, "Environment `Nowhere` doesn't exist"),
        ({"id": "FrozenLake-v1", "options": {"depth": 3}}, "unexpected keyword argument 'depth'"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b"]}, "has 4 actions, and 2 are named"),
        ({"id": "Pendulum-v1"}, "neither discrete nor text"),
        (
            {"id": "rollfarm/Odd-v0", "options": {"space": gymnasium.spaces.Text(3)}, "actions": ["a"]},
            "whose actions have no names",
        ),
    ],
)
def test_what_gymnasium_does_not_take_is_the_caller_s_mistake(settings: dict[str, Any], problem: str):
    world = Gymnasium(**settings)

    with pytest.raises(InvalidArgument, match=problem):
        world.reset(0, 0)
    world.close()
