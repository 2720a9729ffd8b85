"""A whole environment in a process of its own: call the other side of the coin.

`python examples/coin_server.py` serves it, `rollfarm up examples/coin.toml` plays it, docs/environments.md explains.
"""

import random

from rollfarm.env import Environment, Step, serve

OTHER = {"heads": "tails", "tails": "heads"}


class Coin(Environment):
    def __init__(self, *, flips: int = 3) -> None:
        self.flips, self.turn, self.hits = flips, 0, 0

    def reset(self, seed: int, index: int) -> str:
        self.chance = random.Random(seed)
        return self.flip()

    def flip(self) -> str:
        self.side = self.chance.choice(list(OTHER))
        return f"the coin shows {self.side}"

    def step(self, action: str) -> Step:
        right = action.strip() == OTHER[self.side]
        self.turn, self.hits = self.turn + 1, self.hits + right
        metrics = {"success": self.hits / self.flips}
        return Step(self.flip(), reward=right / self.flips, done=self.turn == self.flips, metrics=metrics)


if __name__ == "__main__":
    serve(Coin)
