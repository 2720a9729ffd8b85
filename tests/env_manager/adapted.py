"""How the tests of adapters play."""

from collections.abc import Callable
from dataclasses import dataclass

from rollfarm.env import Action, Environment, Observation, Step

Act = Callable[[str], str]
"""What is shown, to what is done."""


@dataclass(frozen=True)
class Played:
    """An episode that was played to its end, or for as long as it was let."""

    shown: list[str]
    reward: float
    last: Step


def play(environment: Environment, act: Act, *, seed: int = 7, index: int = 0, turns: int = 200) -> Played:
    """Play one episode; its methods are not asynchronous."""
    try:
        observation = environment.reset(seed, index)
        assert isinstance(observation, Observation)
        shown, reward, step = [observation.text], 0.0, Step()
        for _ in range(turns):
            answer = environment.step(Action(act(shown[-1])))
            assert isinstance(answer, Step)
            step = answer
            shown.append(step.text)
            reward += step.reward
            if step.done:
                break
        return Played(shown, reward, step)
    finally:
        environment.close()


GARBAGE = ["", "\x00", "left right", "🦆" * 50, "[", "\\boxed{", "-1", "9" * 400, "a\nb", "[[0]]", "{}", "null"]
"""Actions that mean nothing to anybody."""
