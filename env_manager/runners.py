"""Where an agent runs for one episode: a process (agent_process.py) or a container (agent_container.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of an agent."""

    answer: str
    """What it printed, or the end of it."""

    status: int | None
    """Its exit status, or 128 and the number of the signal that ended it; None where its time was over."""

    complaint: str = ""
    """The end of what it wrote to stderr."""


class Runner(Protocol):
    """Where agents run: in a process or in a container."""

    async def run(self, text: str, variables: Mapping[str, str], seconds: float) -> Ran:
        """Run the agent with `text` on its stdin, for at most `seconds`. Nothing of it is left afterwards.

        Raises AgentFailed where it cannot be run.
        """
        ...
