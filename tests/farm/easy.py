"""An environment that a few steps suffice to learn."""

from rollfarm.env import Environment, Observation, Step

PAID = frozenset(["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "left", "down", "right", "up"])
"""14 of the 24 tokens that the policy may write, so that a policy that knows nothing earns about 0.6."""

TURNS = 2


class HalfOfTheWords(Environment):
    """Two turns, each in a state of its own; a word that is paid earns half."""

    def reset(self, seed: int, index: int) -> Observation:
        self._turn = 0
        return Observation("at 0", state_hash="0")

    def step(self, action: str) -> Step:
        self._turn += 1
        reward = (action.strip() in PAID) / TURNS
        return Step(f"at {self._turn}", reward=reward, done=self._turn == TURNS, state_hash=str(self._turn))
