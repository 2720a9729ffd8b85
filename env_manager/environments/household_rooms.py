"""What the rooms of the household hold: kinds of receptacles, and of the objects that lie about in them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of room."""

    receptacles: Mapping[str, int]
    """By kind, the most of them that there are; there is at least one."""

    objects: tuple[str, ...]
    """Kinds of things that lie about."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
"""Receptacles that begin closed."""

INSIDE = OPENABLE | {"bathtubbasin", "garbagecan", "sinkbasin", "laundryhamper"}
"""Receptacles that hold things in them, and not on them."""

TREATERS: Mapping[str, str] = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""By what is done to an object, where."""

STATES: Mapping[str, str] = {"clean": "clean", "heat": "hot", "cool": "cool"}
"""By what is done to an object, what it is then."""

TREATABLE: Mapping[str, tuple[str, ...]] = {
    "clean": _names(
        "apple bowl butterknife cloth cup egg fork knife ladle lettuce mug pan plate pot potato soapbar spatula spoon "
        "tomato"
    ),
    "heat": _names("apple bread cup egg mug plate potato tomato"),
    "cool": _names("apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle"),
}
"""By what is done to an object, the kinds to which it can be done."""

LAMP = "desklamp"
"""It stays where it stands."""

ROOMS: Mapping[str, Room] = {
    "kitchen": Room(
        {
            "cabinet": 6,
            "countertop": 3,
            "drawer": 4,
            "fridge": 1,
            "garbagecan": 1,
            "microwave": 1,
            "shelf": 3,
            "sinkbasin": 1,
            "stoveburner": 4,
            "diningtable": 1,
        },
        _names(
            "apple bowl bread butterknife cup egg fork knife ladle lettuce mug pan peppershaker plate pot potato "
            "saltshaker spatula spoon tomato vase winebottle"
        ),
    ),
    "bathroom": Room(
        {
            "bathtubbasin": 1,
            "cabinet": 4,
            "countertop": 1,
            "garbagecan": 1,
            "shelf": 2,
            "sinkbasin": 2,
            "towelholder": 2,
            "toilet": 1,
        },
        _names("candle cloth handtowel soapbar soapbottle spraybottle tissuebox toiletpaper towel"),
    ),
    "bedroom": Room(
        {"bed": 1, "desk": 2, "drawer": 4, "dresser": 1, "garbagecan": 1, "laundryhamper": 1, "safe": 1, "shelf": 3},
        _names(
            "alarmclock basketball book bowl box cd cellphone creditcard keychain laptop mug pen pencil pillow "
            "teddybear tissuebox watch"
        ),
    ),
    "livingroom": Room(
        {
            "armchair": 2,
            "cabinet": 3,
            "coffeetable": 1,
            "drawer": 3,
            "garbagecan": 1,
            "safe": 1,
            "shelf": 3,
            "sidetable": 2,
            "sofa": 1,
        },
        _names("book box creditcard keychain laptop newspaper pillow plate remotecontrol statue tissuebox vase watch"),
    ),
}

LIT_ROOMS = ("bedroom", "livingroom")
"""Rooms with a desklamp."""

LAMP_STANDS = frozenset({"desk", "sidetable", "coffeetable", "dresser", "shelf"})
"""Receptacles on which it may stand."""
