"""TextArena's games, by their id: alone, or in one seat of several against opponents of the environment's own.

Each turn shows what is new to the policy's seat, and not the whole game again. Equal seeds give equal episodes:
TextArena seeds the process's random numbers, and each episode is given its own. Games that order a set of strings need
PYTHONHASHSEED besides.
"""

import random
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from env_manager.adapters.adapter import SEEDS, Adapter, corpus_missing, function, wrong_setting
from env_manager.adapters.chance import Chance
from rollfarm.env import Observation, Step

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
"""How TextArena writes moves."""

MOST_MOVES = 1000
"""Of the opponents between two of the policy's; a game with more has lost its way."""

Opponent = Callable[[str, random.Random], str]
"""What an opponent answers to what is new to its seat."""


class TextArena(Adapter):
    """One game. It runs in a process: TextArena draws from the process's random numbers, and its games are long
    stretches of pure Python."""

    name = "textarena"
    package = "textarena"
    runs = "process"

    def __init__(
        self,
        *,
        id: str,
        options: dict[str, Any] = {},  # noqa: B006
        players: Annotated[int, Field(ge=1, le=20)] = 1,
        seat: Annotated[int, Field(ge=0)] = 0,
        opponent: str = "random",
    ) -> None:
        """`options` go to textarena.make. The policy plays in `seat`, from 0, and `opponent` in all others: "random"
        takes one of the moves that the game shows it in brackets, and "module:function" is yours, of what is new to
        the seat and a random.Random. Games that show only examples of moves want one of yours."""
        self._id, self._options = id, options
        self._players, self._seat = players, seat
        self._opponent_name = opponent
        self._game: Any = None

    def reset(self, seed: int, index: int) -> Observation:
        if self._seat >= self._players:
            raise wrong_setting(type(self), f"seat {self._seat} is none of {self._players} players, counted from 0")
        self._opponent = self._find_opponent()
        self._random = random.Random(seed)
        self._chance = Chance(seed % SEEDS)
        with self._chance:
            self._begin(seed % SEEDS)
            self._play_others()
            return Observation(self._read())

    def step(self, action: str) -> Step:
        with self._chance:
            over = self._act(str(action)) or self._play_others()
            if not over:
                return Step(self._read())
            rewards, facts = self._game.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        told = str(facts.get(self._seat, {}).get("reason", ""))
        return Step(told, reward=reward, done=True, metrics={"success": float(reward > 0)})

    def _begin(self, seed: int) -> None:
        textarena = self.load()
        try:
            self._game = self._core = textarena.make(self._id, **self._options)
            # The wrappers of observations repeat the whole game; those of actions, which add brackets, stay.
            while isinstance(self._core, textarena.Wrapper):
                self._core = self._core.env
            self._game.reset(num_players=self._players, seed=seed)
        except LookupError as error:
            raise corpus_missing(type(self), self._id, error) or error from None
        except (AssertionError, TypeError, ValueError) as error:
            raise wrong_setting(type(self), f"{self._id} for {self._players}: {error}") from None

    def _act(self, action: str) -> bool:
        return bool(self._game.step(action)[0])

    def _play_others(self) -> bool:
        """Let the opponents play until it is the policy's turn. Whether the game is over."""
        for _ in range(MOST_MOVES):
            if self._core.state.done:
                return True
            if self._core.state.current_player_id == self._seat:
                return False
            if self._act(self._opponent(self._read(), self._random)):
                return True
        raise RuntimeError(f"{self._id}: {MOST_MOVES} moves of opponents in a row")

    def _read(self) -> str:
        """What is new to the seat whose turn it is, its own moves left out."""
        seat, messages = self._core.get_observation()
        roles = self._core.state.role_mapping
        return "\n".join(f"[{roles.get(by, 'GAME')}] {text.strip()}" for by, text, _ in messages if by != seat)

    def _find_opponent(self) -> Opponent:
        if self._opponent_name == "random":
            return self._random_move
        return function(type(self), "opponent", self._opponent_name)

    def _random_move(self, shown: str, chance: random.Random) -> str:
        """One of the moves in the last part of the text that has any."""
        roles = {f"[{role}]" for role in self._core.state.role_mapping.values()}
        for line in reversed(shown.splitlines()):
            if moves := [move for move in MOVE.findall(line) if move not in roles]:
                return chance.choice(moves)
        return "[pass]"
