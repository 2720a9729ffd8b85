"""The levels that tests run at, and how to open them."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from rollfarm.sandbox import Sandbox, SandboxConfig, inside
from rollfarm.sandbox.levels import Chosen, Missing, choose

LEVELS = [
    "bubblewrap",
    "landlock",
    pytest.param("bubblewrap of nobody", marks=pytest.mark.slow),
    pytest.param("landlock of nobody", marks=pytest.mark.slow),
]
"""As whoever runs the tests; and where that is root, also as a user without any privilege."""

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
AS_NOBODY = f"""#!/bin/sh
exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups -- {SYSTEM_PYTHON} "$@"
"""


@contextmanager
def opened(level: str, *, workers: int = 2) -> Iterator[Sandbox]:
    """A sandbox of this level. Skips the test where the machine has none."""
    name, _, user = level.partition(" of ")
    sandbox = Sandbox(SandboxConfig(level=name, workers=workers))  # pyright: ignore[reportArgumentType]
    with tempfile.TemporaryDirectory() as folder:
        try:
            chosen = _of_nobody(name, workers, Path(folder)) if user else choose(sandbox._config)
        except Missing as missing:
            pytest.skip(str(missing))
        sandbox.__dict__["_chosen"] = chosen
        try:
            yield sandbox
        finally:
            sandbox.close()


def _of_nobody(level: str, workers: int, folder: Path) -> Chosen:
    """The level as a service has it that is not root."""
    if os.getuid() != 0:
        raise Missing("Only root can be nobody, and whoever else runs this has tested the same already.")
    folder.chmod(0o755)
    python = folder / "python"
    python.write_text(AS_NOBODY)
    python.chmod(0o755)
    looked = subprocess.run([python, "-c", f"open({str(inside.__file__)!r})"], capture_output=True)
    if looked.returncode != 0:
        raise Missing("Nobody may run the system's Python, or read this checkout.")
    with mock.patch.object(os, "getuid", return_value=NOBODY):
        config = SandboxConfig(level=level, workers=workers, python=SYSTEM_PYTHON)  # pyright: ignore[reportArgumentType]
        return replace(choose(config), python=str(python))
