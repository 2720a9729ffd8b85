"""The rules of Sokoban, how a solvable puzzle is made, and a bounded search for its solution. Pure.

A puzzle is made by playing backwards: boxes start on their targets, and a player who pulls takes them away. What was
pulled can be pushed back, so every puzzle has a solution, and never a longer one than the way back.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Action word to (row, column) step."""

AT_HOME = 1000
"""What a box at home takes off a position's score."""

BACK = {"left": "right", "right": "left", "up": "down", "down": "up"}

CANDIDATES = 3
"""Puzzles made, of which the one that needs most pushes is taken."""

MAX_TRIES = 100
"""Rooms tried before those without inner walls are."""


@dataclass(frozen=True, slots=True)
class State:
    """Where the player and the boxes are."""

    player: Cell
    boxes: frozenset[Cell]


@dataclass(frozen=True, slots=True)
class Room:
    """What never moves."""

    floor: frozenset[Cell]
    """Every cell that is no wall; each can be reached from each."""

    targets: frozenset[Cell]
    """Where boxes belong."""

    def after(self, state: State, word: str) -> State | None:
        """The state after a move; None where a wall or a second box is in the way."""
        ahead = beside(state.player, word)
        if ahead not in self.floor:
            return None
        if ahead not in state.boxes:
            return State(ahead, state.boxes)
        beyond = beside(ahead, word)
        if beyond not in self.floor or beyond in state.boxes:
            return None
        return State(ahead, state.boxes - {ahead} | {beyond})

    def is_solved(self, state: State) -> bool:
        return state.boxes == self.targets


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A room, how it begins, and one way to solve it."""

    room: Room
    start: State
    solution: tuple[str, ...]


def beside(cell: Cell, word: str) -> Cell:
    down, right = MOVES[word]
    return cell[0] + down, cell[1] + right


def make_puzzle(chance: random.Random, *, size: int, boxes: int, walls: float, moves: int) -> Puzzle:
    """A puzzle on `size` by `size` cells, outer walls included, that at most `moves` moves solve; a hard one."""
    made: list[tuple[int, Puzzle]] = []
    for share in [walls] * MAX_TRIES + [0.0] * MAX_TRIES:
        floor = _make_floor(chance, size, share)
        if len(floor) < 2 * boxes + 2:
            continue
        targets = frozenset(chance.sample(sorted(floor), boxes))
        pushes, puzzle = _pulled_apart(chance, Room(floor, targets), moves)
        if not puzzle.start.boxes & targets:
            made.append((pushes, puzzle))
        if len(made) == CANDIDATES:
            break
    if not made:
        raise ValueError(f"No puzzle of size {size} with {boxes} boxes was found that {moves} turns solve; allow more.")
    return max(made, key=lambda candidate: candidate[0])[1]


def search(room: Room, start: State, *, most_states: int) -> list[str] | None:
    """A shortest solution by A*; None where there is none, or where `most_states` were looked at in vain."""
    distance = _push_distances(room)

    def bound(state: State) -> int | None:
        """Pushes that are still needed at least; None where a box can never be brought home."""
        total = 0
        for box in state.boxes:
            if box not in distance:
                return None
            total += distance[box]
        return total

    order = count()
    first = bound(start)
    queue = [] if first is None else [(first, next(order), 0, start)]
    came: dict[State, tuple[State, str] | None] = {start: None}
    while queue and len(came) < most_states:
        _, _, moves, state = heapq.heappop(queue)
        if room.is_solved(state):
            return list(_way(came, state))
        for word in MOVES:
            following = room.after(state, word)
            if following is None or following in came:
                continue
            came[following] = (state, word)
            if (left := bound(following)) is not None:
                heapq.heappush(queue, (moves + 1 + left, next(order), moves + 1, following))
    return None


def _make_floor(chance: random.Random, size: int, walls: float) -> frozenset[Cell]:
    inner = range(1, size - 1)
    free = {(row, column) for row in inner for column in inner if chance.random() >= walls}
    if not free:
        return frozenset()
    return frozenset(_walks(free, chance.choice(sorted(free))))


def _pulled_apart(chance: random.Random, room: Room, moves: int) -> tuple[int, Puzzle]:
    """The position farthest from solved of those that random pulls within `moves` moves lead to, and how far it is.

    A box that is still at home counts against it more than any distance could.
    """
    state = State(chance.choice(sorted(room.floor - room.targets)), room.targets)
    best, best_score, backwards = state, -AT_HOME * len(state.boxes), list[str]()
    way: list[str] = []
    distance = _push_distances(room)
    while pulls := _pulls(room, state, moves - len(way)):
        walk, word = chance.choice(pulls)
        way += [*walk, word]
        state = _pull(_walked(state, walk), word)
        score = sum(distance[box] for box in state.boxes) - AT_HOME * len(state.boxes & room.targets)
        if score > best_score:
            best, best_score, backwards = state, score, list(way)
    return best_score, Puzzle(room, best, tuple(BACK[word] for word in reversed(backwards)))


def _pulls(room: Room, state: State, moves: int) -> list[tuple[list[str], str]]:
    """Every pull that at most `moves` moves allow: the walk there, and the pull's own direction."""
    walks = _walks(room.floor - state.boxes, state.player)
    return [
        (walks[stand], word)
        for box in sorted(state.boxes)
        for word in MOVES
        if (stand := beside(box, word)) in walks and beside(stand, word) in walks and len(walks[stand]) < moves
    ]


def _pull(state: State, word: str) -> State:
    box = beside(state.player, BACK[word])
    return State(beside(state.player, word), state.boxes - {box} | {state.player})


def _walked(state: State, walk: Sequence[str]) -> State:
    player = state.player
    for word in walk:
        player = beside(player, word)
    return State(player, state.boxes)


def _walks(free: set[Cell] | frozenset[Cell], start: Cell) -> dict[Cell, list[str]]:
    """A shortest walk to every cell that can be reached."""
    walks: dict[Cell, list[str]] = {start: []}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for word in MOVES:
            if (following := beside(cell, word)) in free and following not in walks:
                walks[following] = [*walks[cell], word]
                queue.append(following)
    return walks


def _push_distances(room: Room) -> dict[Cell, int]:
    """Pushes from each cell to the nearest target, were the box alone; cells without a way are left out."""
    distance = dict.fromkeys(room.targets, 0)
    queue = deque(room.targets)
    while queue:
        cell = queue.popleft()
        for word in MOVES:
            pulled = beside(cell, word)
            if pulled in room.floor and beside(pulled, word) in room.floor and pulled not in distance:
                distance[pulled] = distance[cell] + 1
                queue.append(pulled)
    return distance


def _way(came: dict[State, tuple[State, str] | None], end: State) -> Iterator[str]:
    words: list[str] = []
    step = came[end]
    while step is not None:
        state, word = step
        words.append(word)
        step = came[state]
    return reversed(words)
