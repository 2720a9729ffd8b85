"""What is to be done in the household, when it is done, and a room in which it can be. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from env_manager.environments.household_house import House, kind_of
from env_manager.environments.household_rooms import (
    INSIDE,
    LAMP,
    LAMP_STANDS,
    LIT_ROOMS,
    ROOMS,
    STATES,
    TREATABLE,
    TREATERS,
    Room,
)

ChoreType = Literal[
    "pick_and_place",
    "pick_two",
    "look_at_obj_in_light",
    "clean_and_place",
    "heat_and_place",
    "cool_and_place",
]

MOST_ALIKE = 3
"""Most objects of one kind."""


@dataclass(frozen=True, slots=True)
class Chore:
    """What is to be done."""

    kind: str
    """Of the object."""

    place: str = ""
    """The kind of receptacle where it belongs; empty is in the hand, under the desklamp."""

    treatment: str = ""
    """clean, heat, cool, or empty for none."""

    count: int = 1
    """How many of them."""

    @property
    def text(self) -> str:
        if not self.place:
            return f"look at a {self.kind} under the {LAMP}."
        where = f"{'in' if self.place in INSIDE else 'on'} a {self.place}."
        if self.count == 2:
            return f"put two {self.kind} {where}"
        return f"put a {STATES[self.treatment]} {self.kind} {where}" if self.treatment else f"put a {self.kind} {where}"

    @property
    def conditions(self) -> int:
        """How many there are."""
        return self.count if self.place and not self.treatment else 2

    def met(self, house: House) -> int:
        """How many conditions are met; for one object, those that the best one meets."""
        if not self.place:
            under_light = house.lamp_is_on and house.at == house.lamp_stands
            return (kind_of(house.held) == self.kind) + under_light
        here = [name for place, names in house.places.items() if kind_of(place) == self.place for name in names]
        if not self.treatment:
            return min(self.count, sum(kind_of(name) == self.kind for name in here))
        treated = {name for name, state in house.states.items() if state == STATES[self.treatment]}
        return max(((name in treated) + (name in here) for name in self._alike(house)), default=0)

    def wanted(self, house: House) -> tuple[str, str]:
        """An object to take next, treated where there is one, and where it is."""
        found = [
            (house.states.get(name) != STATES.get(self.treatment), name, place)
            for place, names in house.places.items()
            for name in names
            if kind_of(name) == self.kind and (self.treatment or kind_of(place) != self.place)
        ]
        _, name, place = min(found)
        return name, place

    def _alike(self, house: House) -> list[str]:
        names = [name for names in house.places.values() for name in names] + [house.held]
        return [name for name in names if kind_of(name) == self.kind]


def make(chance: random.Random, types: Sequence[ChoreType]) -> tuple[House, Chore]:
    """A room, and a chore in it of one of the types, of which nothing is done yet."""
    chore_type = chance.choice(types)
    room_name = chance.choice(_rooms_for(chore_type))
    room = ROOMS[room_name]
    chore = _make_chore(chance, chore_type, room)
    places = {
        f"{kind} {number}": list[str]()
        for kind, most in room.receptacles.items()
        for number in range(1, chance.randint(1, most) + 1)
    }
    for kind in room.objects:
        least = chore.count if kind == chore.kind else 0
        free = [place for place in places if kind != chore.kind or kind_of(place) != chore.place]
        for number in range(1, chance.randint(least, MOST_ALIKE) + 1):
            places[chance.choice(free)].append(f"{kind} {number}")
    stands = [place for place in places if kind_of(place) in LAMP_STANDS] if room_name in LIT_ROOMS else []
    return House(places, lamp_stands=chance.choice(stands) if stands else ""), chore


def _rooms_for(chore_type: ChoreType) -> list[str]:
    if chore_type == "look_at_obj_in_light":
        return list(LIT_ROOMS)
    treatment = _treatment(chore_type)
    return [
        name
        for name, room in ROOMS.items()
        if not treatment or (TREATERS[treatment] in room.receptacles and set(TREATABLE[treatment]) & set(room.objects))
    ]


def _make_chore(chance: random.Random, chore_type: ChoreType, room: Room) -> Chore:
    treatment = _treatment(chore_type)
    kind = chance.choice([kind for kind in room.objects if not treatment or kind in TREATABLE[treatment]])
    if chore_type == "look_at_obj_in_light":
        return Chore(kind)
    place = chance.choice([place for place in room.receptacles if place != TREATERS.get(treatment)])
    return Chore(kind, place, treatment, count=2 if chore_type == "pick_two" else 1)


def _treatment(chore_type: ChoreType) -> str:
    verb = chore_type.partition("_")[0]
    return verb if verb in TREATERS else ""
