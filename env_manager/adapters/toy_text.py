"""Gymnasium's toy-text worlds in words: what each action is called, and what an observation means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PLACES = "red", "green", "yellow", "blue"
"""Taxi's stands, in the order of its numbers."""


@dataclass(frozen=True)
class Toy:
    """How one world is told."""

    task: str
    """Told once, before the first observation."""

    actions: Sequence[str]
    """By number."""

    tell: Callable[[Any, Any], str]
    """The unwrapped world and its observation, in words."""


def _frozen_lake(world: Any, at: int) -> str:
    return _map(world.desc.tolist(), int(at), world.ncol)


def _cliff(world: Any, at: int) -> str:
    rows, columns = world.shape
    cells = [[b"."] * columns for _ in range(rows)]
    cells[-1] = [b"S", *[b"C"] * (columns - 2), b"G"]
    return _map(cells, int(at), columns)


def _map(cells: list[list[bytes]], at: int, columns: int) -> str:
    """The map, with a P where the player stands."""
    cells[at // columns][at % columns] = b"P"
    return "\n".join(b"".join(row).decode() for row in cells)


def _taxi(world: Any, observation: int) -> str:
    row, column, passenger, target = world.decode(int(observation))
    stands = ", ".join(f"{name} {place}" for name, place in zip(PLACES, world.locs, strict=True))
    waits = "in the taxi" if passenger == len(PLACES) else f"at {PLACES[passenger]}"
    streets = "\n".join(b"".join(line).decode() for line in world.desc.tolist())
    return (
        f"{streets}\nThe taxi is at {(int(row), int(column))}, the passenger is {waits} and wants to go to "
        f"{PLACES[target]}. Stands (row, column): {stands}."
    )


def _blackjack(world: Any, observation: tuple[int, int, int]) -> str:
    total, dealer, ace = map(int, observation)
    return f"You hold {total}{' with a usable ace' if ace else ''}; the dealer shows {dealer}."


LAKE = Toy(
    "Walk over the frozen lake from the start S to the goal G, without stepping into a hole H. P is you, F is ice.",
    ("left", "down", "right", "up"),
    _frozen_lake,
)

TOYS: dict[str, Toy] = {
    "FrozenLake": LAKE,
    "FrozenLake8x8": LAKE,
    "CliffWalking": Toy(
        "Walk from the start S to the goal G. A step costs 1, and one into the cliff C costs 100 and puts you back.",
        ("up", "right", "down", "left"),
        _cliff,
    ),
    "Taxi": Toy(
        "Fetch the passenger and bring them where they want to go. Walls are | and cannot be crossed.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
    ),
    "Blackjack": Toy(
        "Play blackjack against the dealer: come closer to 21, and not over it.",
        ("stick", "hit"),
        _blackjack,
    ),
}
"""By the name in the world's id, without its version."""
