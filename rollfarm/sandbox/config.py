"""What a service that runs model-written programs reads about its sandbox."""

from typing import Literal

from pydantic import Field

from rollfarm.config import Config
from rollfarm.sandbox.program import Limits


class SandboxConfig(Config):
    """How model-written programs are kept in."""

    level: Literal["auto", "bubblewrap", "landlock", "docker"] = "auto"
    """What keeps them in. "auto" takes the first of the other three that works here; without any, nothing is run."""

    workers: int = Field(default=4, ge=1, le=64)
    """Programs that run at once. As many sandboxes are started ahead of time, of about 10 MB each."""

    python: str = ""
    """Path of the Python for programs, with the packages that it has. Empty takes the service's own, without any."""

    image: str = "python:3.11-slim-bookworm"
    """Image of the level "docker"; it must be there, and have `python3` and `sleep`. It is never pulled."""

    limits: Limits = Limits()
    """Of programs that bring none of their own. None may ask for more file_bytes than this."""
