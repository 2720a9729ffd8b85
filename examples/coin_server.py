"""A whole environment outside the farm, in a process of its own: a coin shows one side, and the policy names the other.

    python examples/coin_server.py --port 7730
    python -m env_manager farm.toml --env_manager.servers '["127.0.0.1:7730"]'

with a domain in the farm's file that plays it, and [reward_gateway.domains.coin] with the reward "environment":

    [[run.domains]]
    name = "coin"
    environment = "coin"
    settings = { flips = 5 }
"""

import random

from rollfarm.env import Environment, Step, serve

OTHER = {"heads": "tails", "tails": "heads"}


class Coin(Environment):
    """Name the side of the coin that does not show."""

    def __init__(self, *, flips: int = 3) -> None:
        self.left = self.flips = flips

    def reset(self, seed: int, index: int) -> str:
        self.chance = random.Random(seed)
        return self.flip()

    def flip(self) -> str:
        self.side = self.chance.choice(list(OTHER))
        return f"the coin shows {self.side}"

    def step(self, action: str) -> Step:
        self.left -= 1
        right = action.strip() == OTHER[self.side]
        return Step(self.flip(), reward=right / self.flips, done=self.left == 0, metrics={"success": float(right)})


if __name__ == "__main__":
    serve(Coin)
