"""TextWorld's generated games: a household to explore by commands, made from the task's seed.

Making one takes seconds, as its compiler does, so that games are kept in a folder, by their seed and settings. Equal
seeds give equal episodes.
"""

import hashlib
import json
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from env_manager.adapters.adapter import SEEDS, Adapter, wrong_setting
from rollfarm.env import Observation, Step

STATUS = re.compile(r"\s*>?\s*-= [^\n]*=-\d+/\d+\s*$|\s*>\s*$")
"""What the interpreter prints of its status line and prompt after each text."""

LOGO = re.compile(r"^[\s\\/_$|<>=.,'`()-]*(?=\w)")
"""What is drawn above the first text: no letters in it."""

CHALLENGES: dict[str, Mapping[str, Any]] = {
    "rooms": {"rooms": 3, "objects": 4, "quest_length": 3},
    "coin_collector": {"level": 5},
    "treasure_hunter": {"level": 5},
    "simple": {"rewards": "balanced", "goal": "brief", "test": False},
    "cooking": {
        "recipe": 1,
        "take": 1,
        "go": 1,
        "open": False,
        "cook": False,
        "cut": False,
        "drop": False,
        "split": "train",
        "recipe_seed": 0,
    },
}
"""Their options with what they are where nobody says otherwise. "rooms" is TextWorld's own generator of quests."""


class TextWorld(Adapter):
    """One game. It runs in a process: making games is pure Python for seconds, and the interpreter that plays them is
    C that may take its process down."""

    name = "textworld"
    package = "textworld"
    runs = "process"

    def __init__(
        self,
        *,
        challenge: Literal["rooms", "coin_collector", "treasure_hunter", "simple", "cooking"] = "rooms",
        options: dict[str, Any] = {},  # noqa: B006
        turns: Annotated[int, Field(ge=1)] = 50,
        commands: bool = False,
        folder: str = "",
    ) -> None:
        """`options` are the challenge's, as tw-make takes them; those of "rooms" are rooms, objects and quest_length.
        `commands` tells with each text which commands are possible. An empty `folder` keeps the games under the
        system's folder for temporary files; they are about 400 kB each, and nobody removes them."""
        self._challenge, self._options = challenge, options
        self._turns_left = turns
        self._commands = commands
        self._folder = Path(folder or Path(tempfile.gettempdir()) / "rollfarm-textworld")
        self._game: Any = None

    def reset(self, seed: int, index: int) -> Observation:
        package = self.load()
        path = self._make(package, seed % SEEDS)
        infos = package.EnvInfos(
            score=True, max_score=True, won=True, lost=True, admissible_commands=True, description=True, inventory=True
        )
        self._game = package.start(str(path), request_infos=infos)
        state = self._game.reset()
        self._score, self._most = 0, state.max_score or 1
        return Observation(LOGO.sub("", self._tell(state)), state_hash=_hash(state))

    def step(self, action: str) -> Step:
        command = (action.strip().splitlines() or [""])[0]
        state, _, over = self._game.step(command)
        earned, self._score = (state.score or 0) - self._score, state.score or 0
        self._turns_left -= 1
        done = bool(over) or self._turns_left == 0
        return Step(
            self._tell(state),
            reward=earned / self._most,
            done=done,
            truncated=done and not over,
            state_hash=_hash(state),
            metrics={"success": float(bool(state.won)), "score": self._score / self._most},
        )

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _tell(self, state: Any) -> str:
        text = re.sub(r"\n{3,}", "\n\n", STATUS.sub("", state.feedback).strip())
        if not self._commands:
            return text
        return f"{text}\nPossible: {', '.join(sorted(state.admissible_commands))}."

    def _make(self, package: Any, seed: int) -> Path:
        """The game's file. A file appears there whole, so that two episodes may make the same one."""
        known = CHALLENGES[self._challenge]
        unknown = sorted(set(self._options) - set(known))
        if unknown:
            raise wrong_setting(
                type(self), f"unknown options {', '.join(unknown)}; {self._challenge} takes {', '.join(known)}"
            )
        options = {**known, **self._options}
        told = json.dumps([package.version.__version__, self._challenge, options, seed], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.z8"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                made = self._compile(package, options, seed, Path(folder))
                # The game's JSON says what is possible and what is earned, and has to be there before the game is.
                made.with_suffix(".json").replace(path.with_suffix(".json"))
                made.replace(path)
        return path

    def _compile(self, package: Any, options: Mapping[str, Any], seed: int, folder: Path) -> Path:
        wanted = package.GameOptions()
        wanted.seeds = seed
        wanted.path = str(folder / "game.z8")
        try:
            if self._challenge == "rooms":
                wanted.nb_rooms = options["rooms"]
                wanted.nb_objects = options["objects"]
                wanted.quest_length = options["quest_length"]
                game = package.generator.make_game(wanted)
            else:
                _, make, _ = self.load("textworld.challenges").CHALLENGES[f"tw-{self._challenge}"]
                game = make(options, wanted)
        except (AssertionError, TypeError, ValueError) as error:
            raise wrong_setting(type(self), f"{self._challenge} cannot be made with {options}: {error}") from None
        return Path(package.generator.compile_game(game, wanted))


def _hash(state: Any) -> str:
    return f"{zlib.crc32(f'{state.description}|{state.inventory}'.encode()):08x}"
