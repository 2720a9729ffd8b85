"""Secrets lie outside the configuration, which says where: "env:NAME" or "file:PATH"."""

import os
import re
from pathlib import Path

from rollfarm.config import ConfigError

SOURCE = re.compile(r"(env|file):.+")
"""Where a secret lies."""

LEAST_CHARACTERS = 16
"""Of a secret: a shorter one can be guessed."""


def read_secret(place: str, source: str, *, least: int = LEAST_CHARACTERS) -> str:
    """The secret at `source`, which the configuration names at `place`; others choose one of fewer characters.

    Raises ConfigError, which never shows it.
    """
    kind, _, where = source.partition(":")
    if kind == "env":
        secret = os.environ.get(where, "").strip()
    else:
        try:
            secret = Path(where).read_text().strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"{place}: {where} cannot be read. Correct the path.") from None
    if len(secret) < least:
        raise ConfigError(f"{place}: {where} holds no key of {least} characters or more. Give it one.")
    return secret
