"""The built-in environments: a literal dict from name to class."""

from env_manager.environments.arithmetic import Arithmetic
from env_manager.environments.coding import Coding
from env_manager.environments.countdown import Countdown
from env_manager.environments.dialogue import Dialogue
from env_manager.environments.frozen_lake import FrozenLake
from env_manager.environments.guess_number import GuessNumber
from env_manager.environments.household import Household
from env_manager.environments.shop import Shop
from env_manager.environments.sokoban import Sokoban
from env_manager.environments.solvable import Solvable
from env_manager.environments.word_game import WordGame

ENVIRONMENTS: dict[str, type[Solvable]] = {
    "arithmetic": Arithmetic,
    "coding": Coding,
    "countdown": Countdown,
    "dialogue": Dialogue,
    "frozen_lake": FrozenLake,
    "guess_number": GuessNumber,
    "household": Household,
    "shop": Shop,
    "sokoban": Sokoban,
    "word_game": WordGame,
}
