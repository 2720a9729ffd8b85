"""Push every box onto a target, in a small warehouse that always can be solved.

Each turn shows the whole room, a line for each row and a symbol for each cell. The policy answers with one word: left,
down, right or up; of a longer answer the last line counts. A box can be pushed, never pulled, and only one at a time.

Reward, together at most 1. Half of it is shared out among the boxes: bringing one onto a target pays its share, and
moving it away costs it again. Solving pays 0.4, and 0.1 for the share of turns that are left. Where it is not shaped,
solving pays 1 and nothing else does.
"""

import random
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from env_manager.environments.sokoban_search import MOVES, Cell, Puzzle, State, make_puzzle, search
from env_manager.environments.solvable import Instant, digest, last_line
from rollfarm.env import Observation, Step

BOXES, SOLVED, SPEED = 0.5, 0.4, 0.1

MOST_STATES = 20_000
"""States that the solver looks at before it takes the way by which the puzzle was made."""

KINDS = ("wall", "floor", "target", "box", "done", "player", "home")
"""What a cell can be; "done" is a box on a target, and "home" the player on one."""

SYMBOLS = {
    "letters": dict(zip(KINDS, "#_OX√PS", strict=True)),
    "xsb": dict(zip(KINDS, "#-.$*@+", strict=True)),
    "words": dict(zip(KINDS, KINDS, strict=True)),
}

RULES = (
    "Push every box onto a target. {legend}. You can push one box at a time and pull none. "
    "Answer with one word: left, down, right or up."
)


class Sokoban(Instant):
    """Multi-turn box pushing, where some mistakes cannot be undone."""

    name = "sokoban"

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=6, le=10)] = 6,
        boxes: Annotated[int, Field(ge=1, le=3)] = 1,
        walls: Annotated[float, Field(ge=0, le=0.4)] = 0.15,
        turns: Annotated[int, Field(ge=0)] = 0,
        symbols: Literal["letters", "xsb", "words"] = "letters",
        shaped: bool = True,
        rules: bool = True,
    ) -> None:
        """`size` counts the outer walls, and `walls` is how likely an inner cell is one. 0 `turns` is four times
        `size` for each box; every puzzle can be solved within them. `rules` explains it all in a system message."""
        self._size, self._boxes, self._walls = size, boxes, walls
        self._turns = self._turns_left = turns or 4 * size * boxes
        self._symbols = SYMBOLS[symbols]
        self._shaped = shaped
        legend = ", ".join(f"{symbol} is {kind}" for kind, symbol in self._symbols.items())
        self._rules = RULES.format(legend=legend) if rules else ""

    def words(self) -> Iterator[str]:
        yield from (*MOVES, *self._symbols.values(), *self._rules.split())

    def reset(self, seed: int, index: int) -> Observation:
        self._puzzle: Puzzle = make_puzzle(
            random.Random(seed), size=self._size, boxes=self._boxes, walls=self._walls, moves=self._turns
        )
        self._state = self._puzzle.start
        self._plan = list(self._puzzle.solution)
        self._plan_is_short = False
        return Observation(self._look(), system=self._rules, state_hash=self._hash())

    def step(self, action: str) -> Step:
        self._turns_left -= 1
        home = self._home_count()
        word = last_line(action)
        if word in MOVES and (following := self._puzzle.room.after(self._state, word)) is not None:
            self._go(word, following)
        solved = self._puzzle.room.is_solved(self._state)
        over = solved or self._turns_left == 0
        return Step(
            "" if over else self._look(),
            reward=self._reward(self._home_count() - home, solved=solved),
            done=over,
            truncated=over and not solved,
            state_hash=self._hash(),
            metrics={"success": float(solved), "progress": self._home_count() / self._boxes},
        )

    def solve(self) -> str:
        """The first move of a shortest solution where the search finds one."""
        if not self._plan_is_short:
            found = search(self._puzzle.room, self._state, most_states=MOST_STATES)
            self._plan, self._plan_is_short = found or self._plan, True
        return self._plan[0] if self._plan else next(iter(MOVES))

    def actions(self) -> list[str]:
        return list(MOVES)

    def _go(self, word: str, following: State) -> None:
        self._state = following
        if self._plan and self._plan[0] == word:
            del self._plan[0]
        else:
            self._plan, self._plan_is_short = [], False

    def _reward(self, brought_home: int, *, solved: bool) -> float:
        if not self._shaped:
            return float(solved)
        ending = SOLVED + SPEED * self._turns_left / self._turns if solved else 0.0
        return BOXES * brought_home / self._boxes + ending

    def _home_count(self) -> int:
        return len(self._state.boxes & self._puzzle.room.targets)

    def _look(self) -> str:
        cells = range(self._size)
        return "\n".join(" ".join(self._symbols[self._kind((row, column))] for column in cells) for row in cells)

    def _kind(self, cell: Cell) -> str:
        room = self._puzzle.room
        if cell not in room.floor:
            return "wall"
        if cell == self._state.player:
            return "home" if cell in room.targets else "player"
        if cell in self._state.boxes:
            return "done" if cell in room.targets else "box"
        return "target" if cell in room.targets else "floor"

    def _hash(self) -> str:
        return digest(self._look())
