"""One room of the household: what is where, what a command does, and which commands do anything. Pure.

Commands and answers follow ALFWorld's text games (arXiv 2010.03768). What does not work answers "Nothing happens." and
changes nothing.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from env_manager.environments.household_rooms import INSIDE, LAMP, OPENABLE, STATES, TREATABLE, TREATERS

NOTHING = "Nothing happens."

_NAME = r"([a-z]+ [0-9]+)"

_PUT = re.compile(rf"(?:put|move) {_NAME} (?:in/on|in|on|to) {_NAME}")


def kind_of(name: str) -> str:
    """The kind of "mug 2" is "mug"."""
    return name.partition(" ")[0]


@dataclass
class House:
    """What is where. Names are such as "mug 2"."""

    places: dict[str, list[str]]
    """By receptacle, the objects in or on it."""

    lamp_stands: str = ""
    """The receptacle at which the desklamp is; empty where there is none."""

    at: str = ""
    """The receptacle before which the policy stands; empty is the middle of the room."""

    held: str = ""
    """The object in the policy's hand; empty is none."""

    lamp_is_on: bool = False
    open: set[str] = field(default_factory=set[str])
    states: dict[str, str] = field(default_factory=dict[str, str])
    """By object, what was done to it last: clean, hot or cool."""

    def is_shut(self, place: str) -> bool:
        return kind_of(place) in OPENABLE and place not in self.open

    def do(self, command: str) -> str:
        """What the command is answered."""
        if command == "look":
            return self._look()
        if command == "inventory":
            return f"You are carrying: {_a(self.held)}." if self.held else "You are not carrying anything."
        for pattern, act in _GRAMMAR:
            if match := pattern.fullmatch(command):
                return act(self, *match.groups())
        return NOTHING

    def commands(self) -> Iterator[str]:
        """Every command that does something now, those that only look included."""
        yield from ("look", "inventory")
        yield from (f"go to {place}" for place in self.places if place != self.at)
        yield from (f"examine {name}" for name in (self.held, self.at) if name)
        if self.at:
            yield from self._commands_here()

    def snapshot(self) -> tuple[object, ...]:
        """Everything that can change."""
        return self.places, self.at, self.held, self.lamp_is_on, sorted(self.open), sorted(self.states.items())

    def _commands_here(self) -> Iterator[str]:
        here, kind = self.at, kind_of(self.at)
        if kind in OPENABLE:
            yield f"open {here}" if self.is_shut(here) else f"close {here}"
        if here == self.lamp_stands and not self.lamp_is_on:
            yield f"use {LAMP} 1"
        if self.held:
            yield from (
                f"{verb} {self.held} with {here}"
                for verb, treater in TREATERS.items()
                if treater == kind and kind_of(self.held) in TREATABLE[verb]
            )
        if not self.is_shut(here):
            if self.held:
                yield f"put {self.held} in/on {here}"
            else:
                yield from (f"take {name} from {here}" for name in self.places[here])

    def _look(self) -> str:
        if not self.at:
            return f"You are in the middle of a room. Looking quickly around you, you see {_list(self.places)}."
        return f"You are facing the {self.at}. {self._describe(self.at)}"

    def _describe(self, place: str) -> str:
        inside = self.places[place] + ([f"{LAMP} 1"] if place == self.lamp_stands else [])
        if kind_of(place) in OPENABLE:
            if self.is_shut(place):
                return f"The {place} is closed."
            return f"The {place} is open. In it, you see {_list(inside)}."
        return f"{'In' if kind_of(place) in INSIDE else 'On'} the {place}, you see {_list(inside)}."

    def _go(self, place: str) -> str:
        if place not in self.places or place == self.at:
            return NOTHING
        self.at = place
        return f"You arrive at {place}. {self._describe(place)}"

    def _take(self, name: str, place: str) -> str:
        if self.held or place != self.at or self.is_shut(place) or name not in self.places[place]:
            return NOTHING
        self.places[place].remove(name)
        self.held = name
        return f"You pick up the {name} from the {place}."

    def _put(self, name: str, place: str) -> str:
        if not name or name != self.held or place != self.at or self.is_shut(place):
            return NOTHING
        self.places[place].append(name)
        self.held = ""
        return f"You put the {name} in/on the {place}."

    def _open(self, place: str) -> str:
        if place != self.at or not self.is_shut(place):
            return NOTHING
        self.open.add(place)
        return f"You open the {place}. {self._describe(place)}"

    def _close(self, place: str) -> str:
        if place != self.at or place not in self.open:
            return NOTHING
        self.open.remove(place)
        return f"You close the {place}."

    def _treat(self, verb: str, name: str, place: str) -> str:
        wrong = name != self.held or place != self.at or kind_of(place) != TREATERS[verb]
        if wrong or kind_of(name) not in TREATABLE[verb]:
            return NOTHING
        self.states[name] = STATES[verb]
        return f"You {verb} the {name} using the {place}."

    def _use(self, name: str) -> str:
        if name != f"{LAMP} 1" or not self.at or self.at != self.lamp_stands or self.lamp_is_on:
            return NOTHING
        self.lamp_is_on = True
        return f"You turn on the {name}."

    def _examine(self, name: str) -> str:
        if name == self.at:
            return self._describe(name)
        if name != self.held:
            return NOTHING
        state = self.states.get(name)
        return f"This is a {state} {name}." if state else f"There is nothing special about the {name}."


_GRAMMAR: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
    (re.compile(rf"go to {_NAME}"), House._go),
    (re.compile(rf"take {_NAME} from {_NAME}"), House._take),
    (_PUT, House._put),
    (re.compile(rf"open {_NAME}"), House._open),
    (re.compile(rf"close {_NAME}"), House._close),
    (re.compile(rf"(clean|heat|cool) {_NAME} with {_NAME}"), House._treat),
    (re.compile(rf"use {_NAME}"), House._use),
    (re.compile(rf"examine {_NAME}"), House._examine),
)


def _a(name: str) -> str:
    return f"a {name}"


def _list(names: Iterable[str]) -> str:
    """As ALFWorld lists things."""
    *first, last = [_a(name) for name in names] or ["nothing"]
    return f"{', '.join(first)}, and {last}" if first else last
