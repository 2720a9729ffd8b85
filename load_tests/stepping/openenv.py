"""OpenEnv, installed in an environment of its own in `.tools`: its pins conflict with much else."""

import subprocess
import sys

from load_tests.buffering.servers import ROOT

VERSION = "0.10.0"
PACKAGES = (f"openenv=={VERSION}", "psutil==7.2.2", "uvloop==0.23.0")
"""uvloop is what uvicorn runs on where it is there."""

VENV = ROOT / ".tools" / "openenv"


class NotInstalled(Exception):
    """It cannot be measured here."""


def install() -> str:
    """Make its environment, once for this checkout; its Python. Raises NotInstalled."""
    done = VENV / f"installed-{VERSION}"
    if not done.is_file():
        print(f"Installing openenv {VERSION} in {VENV} (500 MB, once) ...", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        pip = [str(VENV / "bin" / "pip"), "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", "--only-binary", ":all:", *PACKAGES])
        done.touch()
    return str(VENV / "bin" / "python")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise NotInstalled(done.stdout[-2000:])
