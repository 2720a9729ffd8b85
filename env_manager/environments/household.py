"""Household chores in text, after ALFWorld (arXiv 2010.03768): find things, clean, heat or cool them, put them away.

The policy answers with a command, of which the last line counts, such as "go to desk 1", "take mug 1 from desk 1",
"put mug 1 in/on shelf 2", "open fridge 1", "heat mug 1 with microwave 1" or "use desklamp 1". One that does not work is
answered "Nothing happens." The six types of chores are ALFWorld's.

Doing the chore pays 1. Shaped, each of its conditions pays an equal share when it comes about, and costs it again when
it goes.
"""

import random
from collections.abc import Iterator
from typing import Annotated, get_args

from pydantic import Field

from env_manager.environments.household_chores import Chore, ChoreType, make
from env_manager.environments.household_house import NOTHING, House, kind_of
from env_manager.environments.household_rooms import LAMP, ROOMS, STATES, TREATERS
from env_manager.environments.solvable import Instant, digest, last_line
from rollfarm.env import Observation, Step

RULES = (
    "You do a chore in a household. Answer with one command: go to PLACE, take THING from PLACE, put THING in/on "
    "PLACE, open PLACE, close PLACE, clean THING with PLACE, heat THING with PLACE, cool THING with PLACE, use THING, "
    "examine THING, inventory or look. You carry one thing at a time."
)

SAID = """
You are in the middle of a room. Looking quickly around you, you see a nothing and nothing. Your task is to: You can:
look inventory go arrive at facing The open close closed. open. On the In it, take pick up from put in/on on in two use
turn on clean heat cool hot with using examine This is There special about carrying: not carrying anything. under
"""
"""Words of every answer and every command, apart from names."""


class Household(Instant):
    """Multi-turn chores in a room whose cupboards hide what is needed."""

    name = "household"

    def __init__(
        self,
        *,
        chores: Annotated[list[ChoreType], Field(min_length=1)] = list(get_args(ChoreType)),  # noqa: B006, B008
        turns: Annotated[int, Field(ge=1)] = 50,
        admissible: bool = False,
        shaped: bool = False,
        rules: bool = True,
    ) -> None:
        """The chore is of one of these types. `admissible` ends every answer with all commands that do something then.
        `rules` explains it in a system message."""
        self._chores = chores
        self._turns_left = turns
        self._admissible = admissible
        self._shaped = shaped
        self._rules = RULES if rules else ""

    def words(self) -> Iterator[str]:
        yield from (*SAID.split(), *NOTHING.split(), *self._rules.split(), *TREATERS, *STATES.values(), LAMP)
        for room in ROOMS.values():
            for name in (*room.receptacles, *room.objects):
                yield from (name, f"{name}.")
        yield from (f"{number}{mark}" for number in range(1, 7) for mark in ("", ",", "."))
        yield f"{LAMP}."

    def reset(self, seed: int, index: int) -> Observation:
        self._seed = seed
        self._house, self._chore = make(random.Random(seed), self._chores)
        text = f"{self._house.do('look')}\n\nYour task is to: {self._chore.text}"
        return Observation(text + self._choices(), system=self._rules, state_hash=self._state())

    def step(self, action: str) -> Step:
        self._turns_left -= 1
        met = self._chore.met(self._house)
        answer = self._house.do(" ".join(last_line(action).removeprefix(">").split()))
        now = self._chore.met(self._house)
        done = now == self._chore.conditions
        over = done or self._turns_left == 0
        return Step(
            "" if done else answer if over else answer + self._choices(),
            reward=(now - met) / self._chore.conditions if self._shaped else float(done),
            done=over,
            truncated=over and not done,
            state_hash=self._state(),
            metrics={"success": float(done), "progress": now / self._chore.conditions},
        )

    def solve(self) -> str:
        """The next command of one who knows where everything is."""
        return next_command(self._chore, self._house)

    def actions(self) -> list[str]:
        return list(self._house.commands())

    def _choices(self) -> str:
        return "\n\nYou can:\n" + "\n".join(self._house.commands()) if self._admissible else ""

    def _state(self) -> str:
        return digest(self._seed, self._house.snapshot())


def next_command(chore: Chore, house: House) -> str:
    """What brings the chore nearer to its end."""
    held = house.held
    if held and kind_of(held) != chore.kind:
        return _reach(house, house.at or next(iter(house.places))) or f"put {held} in/on {house.at}"
    if not held:
        name, place = chore.wanted(house)
        return _reach(house, place) or f"take {name} from {place}"
    if not chore.place:
        return _go(house, house.lamp_stands) or f"use {LAMP} 1"
    if chore.treatment and house.states.get(held) != STATES[chore.treatment]:
        treater = f"{TREATERS[chore.treatment]} 1"
        return _go(house, treater) or f"{chore.treatment} {held} with {treater}"
    place = f"{chore.place} 1"
    return _reach(house, place) or f"put {held} in/on {place}"


def _go(house: House, place: str) -> str:
    """The command that brings one to `place`; empty when there."""
    return f"go to {place}" if house.at != place else ""


def _reach(house: House, place: str) -> str:
    """The next command until what is in `place` is at hand; empty when it is."""
    return _go(house, place) or (f"open {place}" if house.is_shut(place) else "")
