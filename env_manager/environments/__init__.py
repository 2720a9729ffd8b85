"""The built-in environments: a literal dict from name to class."""

from env_manager.environments.arithmetic import Arithmetic
from env_manager.environments.frozen_lake import FrozenLake
from env_manager.environments.guess_number import GuessNumber
from env_manager.environments.solvable import Solvable

ENVIRONMENTS: dict[str, type[Solvable]] = {
    "arithmetic": Arithmetic,
    "frozen_lake": FrozenLake,
    "guess_number": GuessNumber,
}
