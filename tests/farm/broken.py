"""An environment and a reward that are broken, as a user's may be."""

from rollfarm.env import Environment, Step
from rollfarm.reward import Episode


class Raises(Environment):
    def reset(self, seed: int, index: int) -> str:
        return "0 0 ice ice ice ice"

    def step(self, action: str) -> Step:
        raise ZeroDivisionError("the ice is broken")


async def not_a_number(episode: Episode) -> float:
    return float("nan")
