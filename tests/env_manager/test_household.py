import random
from typing import get_args

import hypothesis
import pytest
from hypothesis import strategies as st

from env_manager.environments.household import Household, next_command
from env_manager.environments.household_chores import Chore, ChoreType, make
from env_manager.environments.household_house import NOTHING, House

CHORES = get_args(ChoreType)


def kitchen() -> House:
    return House(
        {
            "countertop 1": ["mug 1", "book 1"],
            "cabinet 1": ["mug 2"],
            "fridge 1": [],
            "microwave 1": [],
            "sinkbasin 1": [],
            "desk 1": [],
        },
        lamp_stands="desk 1",
    )


def after(house: House, *commands: str) -> str:
    """The answer to the last of the commands."""
    return [house.do(command) for command in commands][-1]


@pytest.mark.parametrize(
    ("commands", "answer"),
    [
        (["go to countertop 1"], "You arrive at countertop 1. On the countertop 1, you see a mug 1, and a book 1."),
        (["go to cabinet 1"], "You arrive at cabinet 1. The cabinet 1 is closed."),
        (["go to desk 1"], "You arrive at desk 1. On the desk 1, you see a desklamp 1."),
        (["go to sinkbasin 1"], "You arrive at sinkbasin 1. In the sinkbasin 1, you see nothing."),
        (
            ["go to cabinet 1", "open cabinet 1"],
            "You open the cabinet 1. The cabinet 1 is open. In it, you see a mug 2.",
        ),
        (["go to cabinet 1", "open cabinet 1", "close cabinet 1"], "You close the cabinet 1."),
        (["go to countertop 1", "take mug 1 from countertop 1"], "You pick up the mug 1 from the countertop 1."),
        (["go to desk 1", "use desklamp 1"], "You turn on the desklamp 1."),
        (["inventory"], "You are not carrying anything."),
    ],
)
def test_commands_are_answered_as_in_alfworld(commands: list[str], answer: str):
    assert after(kitchen(), *commands) == answer


@pytest.mark.parametrize(
    ("commands", "answer"),
    [
        (["inventory"], "You are carrying: a mug 1."),
        (["examine mug 1"], "There is nothing special about the mug 1."),
        (["go to sinkbasin 1", "clean mug 1 with sinkbasin 1"], "You clean the mug 1 using the sinkbasin 1."),
        (["go to microwave 1", "heat mug 1 with microwave 1"], "You heat the mug 1 using the microwave 1."),
        (["go to fridge 1", "cool mug 1 with fridge 1", "examine mug 1"], "This is a cool mug 1."),
        (["go to desk 1", "put mug 1 in/on desk 1"], "You put the mug 1 in/on the desk 1."),
        (["go to desk 1", "put mug 1 on desk 1", "look"], "You are facing the desk 1. On the desk 1, you see a mug 1"
         ", and a desklamp 1."),
        (["go to desk 1", "move mug 1 to desk 1"], "You put the mug 1 in/on the desk 1."),
    ],
)  # fmt: skip
def test_what_is_in_the_hand_can_be_treated_and_put_away(commands: list[str], answer: str):
    house = kitchen()
    after(house, "go to countertop 1", "take mug 1 from countertop 1")

    assert after(house, *commands) == answer


@pytest.mark.parametrize(
    "commands",
    [
        ["go to moon 1"],
        ["go to"],
        ["take mug 1 from countertop 1"],
        ["go to countertop 1", "go to countertop 1"],
        ["go to countertop 1", "take mug 2 from countertop 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "take book 1 from countertop 1"],
        ["go to countertop 1", "take book 1 from countertop 1", "go to microwave 1", "heat book 1 with microwave 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "heat mug 1 with microwave 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "go to cabinet 1", "put mug 1 in/on cabinet 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "heat mug 1 with fridge 1"],
        ["go to cabinet 1", "take mug 2 from cabinet 1"],
        ["go to cabinet 1", "close cabinet 1"],
        ["go to countertop 1", "open countertop 1"],
        ["go to countertop 1", "put mug 1 in/on countertop 1"],
        ["use desklamp 1"],
        ["go to desk 1", "take desklamp 1 from desk 1"],
        ["examine mug 1"],
        ["", "dance"],
    ],
)
def test_what_does_not_work_is_answered_with_nothing_happens_and_changes_nothing(commands: list[str]):
    house = kitchen()
    after(house, "look", *commands[:-1])
    before = repr(house.snapshot())

    assert house.do(commands[-1]) == NOTHING
    assert repr(house.snapshot()) == before


def test_a_chore_is_done_by_one_object_that_meets_every_condition():
    chore, house = Chore("mug", "desk", "heat"), kitchen()
    mugs: list[tuple[str, ...]] = [
        ("go to countertop 1", "take mug 1 from countertop 1", "go to desk 1", "put mug 1 in/on desk 1"),
        ("go to cabinet 1", "open cabinet 1", "take mug 2 from cabinet 1", "go to microwave 1"),
        ("heat mug 2 with microwave 1", "go to fridge 1"),
        ("go to desk 1", "put mug 2 in/on desk 1"),
    ]

    met = [(after(house, *commands), chore.met(house))[1] for commands in mugs]

    assert met == [1, 1, 1, 2]
    assert chore.text == "put a hot mug on a desk."


def test_cooling_what_is_hot_undoes_the_heat():
    chore, house = Chore("mug", "desk", "heat"), kitchen()
    after(house, "go to countertop 1", "take mug 1 from countertop 1", "go to microwave 1")

    met = [
        (after(house, command), chore.met(house))[1]
        for command in ("heat mug 1 with microwave 1", "go to fridge 1", "cool mug 1 with fridge 1")
    ]

    assert met == [1, 1, 0]


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(seed=st.integers(0, 2**63), chore_type=st.sampled_from(CHORES), noise=st.integers(0, 12))
def test_every_chore_can_be_done_also_after_random_commands(seed: int, chore_type: ChoreType, noise: int):
    chance = random.Random(seed)
    house, chore = make(chance, [chore_type])
    begun = chore.met(house)
    for _ in range(noise):
        house.do(chance.choice(list(house.commands())))

    used = 0
    while chore.met(house) < chore.conditions:
        command = next_command(chore, house)
        assert command in house.commands()
        assert house.do(command) != NOTHING
        used += 1

    assert begun == 0
    assert used <= 20


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(seed=st.integers(0, 2**63))
def test_every_admissible_command_does_something(seed: int):
    chance = random.Random(seed)
    house, _ = make(chance, list(CHORES))
    for _ in range(30):
        command = chance.choice(list(house.commands()))
        assert house.do(command) != NOTHING


@pytest.mark.parametrize("chore", CHORES)
def test_only_the_chores_that_are_asked_for_come_up(chore: ChoreType):
    starts = {"pick_two": "put two ", "look_at_obj_in_light": "look at a "}
    adjectives = {"clean": " clean ", "heat": " hot ", "cool": " cool "}

    for seed in range(20):
        environment = Household(chores=[chore])
        task = environment.reset(seed, 0).text.rpartition("Your task is to: ")[2]
        assert task.startswith(starts.get(chore, "put a "))
        assert adjectives.get(chore.partition("_")[0], " ") in task


def test_shaped_each_condition_pays_its_share_and_costs_it_again():
    environment = Household(chores=["pick_two"], shaped=True)
    environment.reset(3, 0)

    rewards: list[float] = []
    while sum(rewards) < 0.5:
        rewards.append(environment.step(environment.solve()).reward)
    house, chore = environment._house, environment._chore
    name = next(name for name in house.places[f"{chore.place} 1"] if name.startswith(chore.kind))
    taken = environment.step(f"take {name} from {chore.place} 1")

    assert rewards[-1] == 0.5
    assert taken.reward == -0.5


def test_admissible_commands_are_listed_where_that_is_asked_for():
    environment = Household(admissible=True)

    text = environment.reset(0, 0).text

    assert text.rpartition("You can:\n")[2].splitlines() == environment.actions()
    assert "You can:" not in Household().reset(0, 0).text


def test_a_hash_is_equal_exactly_where_everything_is_in_its_place():
    def hashes(*commands: str) -> list[str]:
        environment = Household(chores=["pick_and_place"])
        environment.reset(1, 0)
        return [environment.step(command).state_hash for command in commands]

    environment = Household(chores=["pick_and_place"])
    environment.reset(1, 0)
    first, second = list(environment._house.places)[:2]
    there, away, back = hashes(f"go to {first}", f"go to {second}", f"go to {first}")

    assert there == back != away
    assert hashes("look", "dance")[0] == hashes("dance")[0]
