"""The environment under load: it answers every action with the same text. `python -m` serves it, or dials in."""

from typing import Annotated

from pydantic import Field

from load_tests.stepping.flow import SHORT
from rollfarm.env import Action, Environment, Step, serve


class Echo(Environment):
    """On the event loop."""

    runs = "loop"

    def __init__(self, *, chars: Annotated[int, Field(ge=0)] = SHORT) -> None:
        """`chars` are those of an observation."""
        self._text = "x" * chars

    def reset(self, seed: int, index: int) -> str:
        return "go"

    def step(self, action: Action) -> Step:
        return Step(self._text)


class EchoInThreads(Echo):
    """In a thread of the episode's own."""

    runs = "thread"


class EchoInProcess(Environment):
    """On the event loop of a process that env_manager starts."""

    runs = "process"

    def __init__(self, *, chars: Annotated[int, Field(ge=0)] = SHORT) -> None:
        """`chars` are those of an observation."""
        self._echo = Echo(chars=chars)

    async def reset(self, seed: int, index: int) -> str:
        return self._echo.reset(seed, index)

    async def step(self, action: Action) -> Step:
        return self._echo.step(action)


if __name__ == "__main__":
    serve(Echo, EchoInThreads)
