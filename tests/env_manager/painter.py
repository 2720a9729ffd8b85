"""An environment that shows images."""

import random

from rollfarm.env import Action, Environment, Image, Observation, Step
from tests.vision import picture


class Painter(Environment):
    """Shows two images, then one of them again and another, and asks where to go."""

    def __init__(self, *, turns: int = 2, bad: str = "") -> None:
        self.turns, self.bad = turns, bad

    def reset(self, seed: int, index: int) -> Observation:
        self.dice = random.Random(seed)
        self.first = Image(b"not one" if self.bad == "bytes" else picture(56, 28, seed=self.dice.randrange(99)))
        text = "go <|image_pad|>" if self.bad == "text" else "go down"
        return Observation(text, images=[self.first, Image(picture(100, 60, seed=1, kind="JPEG"), "image/jpeg")])

    def step(self, action: Action) -> Step:
        self.turns -= 1
        if not self.turns:
            return Step(reward=1.0, done=True)
        return Step("go up", images=[self.first, Image(picture(28, 28, seed=3))])
