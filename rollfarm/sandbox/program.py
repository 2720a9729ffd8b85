"""What is run in a sandbox, how much it may use, and how that ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, Literal

from pydantic import Field

from rollfarm.config import Config
from rollfarm.errors import InvalidArgument

PYTHON: Final = "@python"
"""In a command: the sandbox's own Python. `[PYTHON, "main.py", ...]` runs in one that has started already."""

Ending = Literal["exited", "timeout", "memory", "output", "killed"]
"""How a program came to its end: by itself, or because it took too long, took too much memory, or wrote too much.
"killed" is by any other signal, its own included."""


@dataclass(frozen=True)
class Program:
    """Files in a folder of their own, and a command that is run there."""

    files: Mapping[str, bytes | str]
    """Contents by path relative to the folder. Text is written as UTF-8."""

    command: Sequence[str]
    """The program and its arguments; PYTHON stands for the sandbox's Python. One that does not exist exits with 127."""

    stdin: str | bytes = field(default="", repr=False)
    """What it can read, followed by the end of file."""

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidArgument("A program needs a command.")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise InvalidArgument(f"{name!r} is no path within the program's folder.", file=name)


class Limits(Config):
    """What one run may use."""

    seconds: float = Field(default=10.0, gt=0, le=3600)
    """Wall time. What still runs then is killed."""

    cpu_seconds: int = Field(default=10, ge=1)
    """CPU time of each process."""

    memory_bytes: int = Field(default=512 * 2**20, ge=32 * 2**20)
    """Address space of each process, and memory of all of them together."""

    processes: int = Field(default=32, ge=1, le=1000)
    """Processes and threads at once."""

    output_bytes: int = Field(default=2**20, ge=0, le=2**26)
    """stdout and stderr together. A run that writes more is killed, and what it wrote until then is kept."""

    file_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Files of the run together. At the level "bubblewrap" they are memory, and count in addition."""


@dataclass(frozen=True)
class Finished:
    """A run that came to its end. That it ended badly is no error of the sandbox."""

    ending: Ending
    """How."""

    exit_code: int | None
    """Of a program that exited; -N of one that signal N killed; None otherwise."""

    stdout: str
    """What it wrote, cut at the limit; bytes that are no UTF-8 are replaced."""

    stderr: str
    """The same."""

    seconds: float
    """Wall time of the program itself."""

    @property
    def succeeded(self) -> bool:
        """It exited with status 0."""
        return self.ending == "exited" and self.exit_code == 0
