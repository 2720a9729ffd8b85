"""Cross a frozen lake, from the top left to the bottom right, without falling into a hole.

Each turn shows where the policy stands and what lies beside it, "at 0 2 left ice down ice right hole up wall" or, in
the same order and compact, "0 2 ice ice hole wall". It takes one word: left, down, right or up. The map comes from the
task's seed, and the goal can always be reached.

Reward. Let d be the steps that a shortest way still takes, and D what it took at the start. A move pays
0.5 * (d before - d after) / D, signed, so that wandering pays nothing and going back costs what it earned; a fall gives
up all of it. An action that is one of the four words pays 0.1 / turns, and one that is not leaves the policy where it
stands. The goal pays 0.3, and 0.2 / turns for each turn that is left. Together at most 1.
"""

import random
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from env_manager.environments.solvable import Instant
from rollfarm.env import Observation, Step

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Action word to (row, column) step, in the order of the compass, so that neighbours in the list are sideways."""

PROGRESS, GOAL, FORMAT, SPEED = 0.5, 0.3, 0.1, 0.2

MAX_MAPS = 1000
"""Random maps tried before one without holes is taken."""


class FrozenLake(Instant):
    """Multi-turn walking over ice with holes, on a random map."""

    name = "frozen_lake"

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=10)] = 4,
        holes: Annotated[float, Field(ge=0, lt=1)] = 0.2,
        turns: Annotated[int, Field(ge=0)] = 0,
        slippery: bool = False,
        view: Literal["local", "compact", "map"] = "local",
    ) -> None:
        """`holes` is how likely a cell is one. 0 `turns` is twice `size`. On `slippery` ice a move goes astray, to
        either side, two times in three. The view "compact" leaves out the words that never change, and "map" shows
        the whole map first."""
        self._size = size
        self._holes = holes
        self._turns = self._turns_left = turns or 2 * size
        self._slippery = slippery
        self._view = view
        self._goal = (size - 1, size - 1)

    def words(self) -> Iterator[str]:
        yield from (*MOVES, "ice", "goal", "wall", *map(str, range(self._size)))
        if self._holes:
            yield "hole"
        if self._view != "compact":
            yield "at"
        if self._view == "map":
            yield "/"

    def reset(self, seed: int, index: int) -> Observation:
        self._chance = random.Random(seed)
        self._hole_cells, self._distance = self._make_map()
        self._map_id = zlib.crc32(repr(sorted(self._hole_cells)).encode())
        self._at: Cell = (0, 0)
        text = self._look()
        return Observation(f"{self._whole_map()} {text}" if self._view == "map" else text, state_hash=self._state())

    def step(self, action: str) -> Step:
        self._turns_left -= 1
        word = action.strip().lower()
        before = self._potential()
        reward = 0.0
        if word in MOVES:
            reward += FORMAT / self._turns
            self._move(word)
        reward += PROGRESS * (self._potential() - before)
        if self._at == self._goal:
            reward += GOAL + SPEED * self._turns_left / self._turns
            return self._end(reward, success=1.0)
        if self._at in self._hole_cells:
            return self._end(reward, success=0.0)
        if self._turns_left == 0:
            return self._end(reward, success=0.0, truncated=True)
        return Step(self._look(), reward=reward, state_hash=self._state(), metrics=self._metrics(0.0))

    def solve(self) -> str:
        """The first move of a shortest way."""
        return min(MOVES, key=lambda word: self._distance.get(self._beside(word), self._size**2))

    def actions(self) -> list[str]:
        return list(MOVES)

    def _end(self, reward: float, *, success: float, truncated: bool = False) -> Step:
        return Step(
            reward=reward,
            done=True,
            truncated=truncated,
            state_hash=self._state(),
            metrics=self._metrics(success),
        )

    def _metrics(self, success: float) -> dict[str, float]:
        return {"success": success, "progress": self._potential()}

    def _move(self, word: str) -> None:
        if self._slippery:
            words = list(MOVES)
            word = words[(words.index(word) + self._chance.choice((-1, 0, 1))) % len(words)]
        target = self._beside(word)
        if self._inside(target):
            self._at = target

    def _potential(self) -> float:
        """How much of the way is done: 0 at the start and in a hole, 1 at the goal, below 0 farther away."""
        if self._at in self._hole_cells:
            return 0.0
        return 1 - self._distance[self._at] / self._distance[(0, 0)]

    def _look(self) -> str:
        around = {word: self._kind(self._beside(word)) for word in MOVES}
        if self._view == "compact":
            return f"{self._at[0]} {self._at[1]} {' '.join(around.values())}"
        return f"at {self._at[0]} {self._at[1]} {' '.join(f'{word} {kind}' for word, kind in around.items())}"

    def _whole_map(self) -> str:
        cells = range(self._size)
        return " / ".join(" ".join(self._kind((row, column)) for column in cells) for row in cells) + " /"

    def _kind(self, cell: Cell) -> str:
        if not self._inside(cell):
            return "wall"
        return "goal" if cell == self._goal else "hole" if cell in self._hole_cells else "ice"

    def _beside(self, word: str) -> Cell:
        down, right = MOVES[word]
        return self._at[0] + down, self._at[1] + right

    def _inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self._size and 0 <= cell[1] < self._size

    def _state(self) -> str:
        return f"{self._map_id:08x}-{self._at[0]}-{self._at[1]}"

    def _make_map(self) -> tuple[frozenset[Cell], dict[Cell, int]]:
        """Holes, and the distance to the goal of every cell from which it can be reached; the start is one."""
        cells = [(row, column) for row in range(self._size) for column in range(self._size)]
        free = {(0, 0), self._goal}
        for _ in range(MAX_MAPS):
            holes = frozenset(cell for cell in cells if cell not in free and self._chance.random() < self._holes)
            distance = self._distances(holes)
            if (0, 0) in distance:
                return holes, distance
        return frozenset(), self._distances(frozenset())

    def _distances(self, holes: frozenset[Cell]) -> dict[Cell, int]:
        distance = {self._goal: 0}
        queue = deque([self._goal])
        while queue:
            row, column = queue.popleft()
            for down, right in MOVES.values():
                cell = (row + down, column + right)
                if self._inside(cell) and cell not in holes and cell not in distance:
                    distance[cell] = distance[(row, column)] + 1
                    queue.append(cell)
        return distance
